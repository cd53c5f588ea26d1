"""The parent process of trials: session, worker handle, host runs, records."""

from kgen.trial.certificate import Certificate, certified_outcome, certify, record_host_runs
from kgen.trial.handle import WorkerHandle
from kgen.trial.host_runs import HostRunner, HostRunResult, jobs_beside, with_host_runs
from kgen.trial.peer_names import check_peer_names
from kgen.trial.sanitizer import ComputeSanitizer
from kgen.trial.session import Session, failed_build, text_key, trial_key
from kgen.trial.worker_pool import WorkerPool

__all__ = [
    "Certificate",
    "ComputeSanitizer",
    "HostRunResult",
    "HostRunner",
    "Session",
    "WorkerHandle",
    "WorkerPool",
    "certified_outcome",
    "certify",
    "check_peer_names",
    "failed_build",
    "jobs_beside",
    "record_host_runs",
    "text_key",
    "trial_key",
    "with_host_runs",
]
