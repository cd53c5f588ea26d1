"""The options of the commands that run kernels."""

from __future__ import annotations

import argparse

from kgen.cli.arguments import (
    add_common,
    add_compile_limits,
    add_l2,
    add_out,
    add_path,
    count,
    devices,
    duration,
    memory_size,
    names,
    positive,
)

ARRAY_PROBLEMS = 24  # default of `kgen verify --library --array`; parsed as None if not given
DEFAULT_MODEL = "mixed"  # equals kgen.predict.models.DEFAULT, whose module needs numpy


def add_tune(tune: argparse.ArgumentParser) -> None:
    add_common(tune, problems=True, passes=True, compiler=True, seed=True, population=True)
    tune.add_argument(
        "--trials",
        type=positive,
        metavar="N",
        help="most trials per problem, including those of earlier tunes (default: 160; 12 on the "
        "host); warm-start trials of a variant that is newer than the journal do not count",
    )
    tune.add_argument(
        "--time",
        type=duration,
        metavar="60s",
        help="time for all searches and comparisons of finalists together: 90, 60s, 5m, 1h "
        "(default: no limit); a search has at least a quarter of its equal share, and searches "
        "take up to 20 s more while the first config of a variant still compiles",
    )
    add_out(tune, "where the library is written")
    add_l2(tune)
    tune.add_argument(
        "--devices",
        type=devices,
        metavar="all|0,1,...",
        help="CUDA devices of this machine to use, with one process each; GPUs of other models are "
        "tuned at the same time, for tables of their own (default: the first of --gpu). With --gpu "
        "host: one process per number",
    )
    _add_storage(tune, "share the trials with every 'kgen worker' of this database")
    tune.add_argument(
        "--trial-timeout",
        type=duration,
        default=30.0,
        metavar="30s",
        help="a trial that takes longer is killed and recorded; a certificate has six times as "
        "long (default: 30s)",
    )
    tune.add_argument(
        "--device-memory",
        type=memory_size,
        metavar="SIZE",
        help="device memory that trials may use: 512M, 20G (default: all)",
    )
    tune.add_argument(
        "--retry",
        action="store_true",
        help="try again configs that crashed or timed out in earlier tunes",
    )
    peers = tune.add_mutually_exclusive_group()
    _add_against(peers)
    peers.add_argument(
        "--no-peers",
        action="store_true",
        help="do not time eager PyTorch and torch.compile with the winner",
    )


def add_predict(predict: argparse.ArgumentParser) -> None:
    add_common(predict, problems=True, passes=True, compiler=True, seed=True, population=True)
    add_out(predict, "where the library is written")
    predict.add_argument(
        "--from",
        dest="source",
        default="generated",
        metavar="DIR",
        help="library whose recorded searches the model learns from, in addition to those of --out "
        "(default: %(default)s)",
    )
    predict.add_argument(
        "--compiled",
        type=positive,
        default=24,
        metavar="N",
        help="configs to compile for each problem, the most promising ones (default: %(default)s)",
    )
    predict.add_argument(
        "--model",
        choices=["trees", "ridge", "gp", "mixed"],
        help=f"model that ranks configs (default: {DEFAULT_MODEL}; with --judge all)",
    )
    predict.add_argument(
        "--judge",
        action="store_true",
        help="write nothing; evaluate the choices of all models, or of --model, on the recorded "
        "searches, with each problem left out of the training in turn",
    )


def _add_against(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--against",
        type=names,
        metavar="NAME,...",
        help="only these peers: eager, torch.compile, ... (default: all that are installed)",
    )


def _add_storage(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--storage",
        metavar="URL",
        help=f"{what}: postgresql://USER@HOST/DATABASE, mysql://..., sqlite:///FILE, or "
        "grpc://HOST:PORT of Optuna's proxy; without a password, which comes from PGPASSWORD, "
        "~/.pgpass, or a whole URL in KGEN_STORAGE",
    )
    parser.add_argument(
        "--grace",
        type=duration,
        default=60.0,
        metavar="60s",
        help="a process that sends no heartbeat for this time counts as dead, and other processes "
        "take its trials (default: 60s)",
    )
    parser.add_argument(
        "--patience",
        type=duration,
        default=120.0,
        metavar="2m",
        help="how long to wait for a database that does not answer (default: 2m)",
    )


def add_worker(worker: argparse.ArgumentParser) -> None:
    _add_storage(worker, "database of the tunes to help")
    worker.add_argument(
        "--gpu",
        default="auto",
        metavar="GPU",
        help="'auto' (first CUDA GPU, else host), 'host', or a profile's name (default: "
        "%(default)s)",
    )
    worker.add_argument(
        "--device",
        type=count,
        metavar="N",
        help="CUDA device number (default: the first of that GPU)",
    )
    worker.add_argument(
        "--idle",
        type=duration,
        metavar="10m",
        help="end after this time without a tune to help (default: never)",
    )
    add_compile_limits(worker)
    add_out(worker, "where this machine's journals are kept")
    add_path(worker)


def add_verify(verify: argparse.ArgumentParser) -> None:
    add_common(verify, problems=True, passes=True, compiler=True, seed=True)
    verify.add_argument(
        "--sanitize",
        action="store_true",
        help="also run the kernels under compute-sanitizer's memcheck and racecheck "
        "(with --gpu host: under AddressSanitizer)",
    )
    verify.add_argument(
        "--record", metavar="ID", help="verify the config of one record of the journal again"
    )
    verify.add_argument(
        "--library",
        action="store_true",
        help="verify the kernels that the library in --out runs: for every row of the GPU, and "
        "for problems that were not tuned; for a GPU that is not in this machine, on the CPU",
    )
    verify.add_argument(
        "--array",
        type=count,
        metavar="N",
        help="with --library: problems per pass in addition to the rows; together they have every "
        f"pair of dtypes, options and kinds of extents (default: {ARRAY_PROBLEMS})",
    )
    add_out(verify, "where the records are")


def add_bench(bench: argparse.ArgumentParser) -> None:
    add_common(bench, problems=True, passes=True, compiler=True, seed=True)
    subject = bench.add_mutually_exclusive_group()
    _add_against(subject)
    subject.add_argument(
        "--ladder",
        action="store_true",
        help="time the steps of the operator's published table instead",
    )
    add_out(bench, "where the tuned library is")
    bench.add_argument(
        "--yaml", metavar="FILE", help="write all results to a file; see docs/bench.md"
    )
    bench.add_argument(
        "--profile",
        action="store_true",
        help="run kernel and peers under torch.profiler instead of timing them: end-to-end time, "
        "largest kernel, a trace",
    )
    bench.add_argument(
        "--call-cost",
        action="store_true",
        help="measure the host time of a call of kgen_ops and of the peers instead (default "
        "problem: the operator's smallest)",
    )
    bench.add_argument(
        "--trace",
        metavar="FILE",
        help="where --profile writes the trace (default: OP-GPU.pt.trace.json)",
    )


def add_learn(learn: argparse.ArgumentParser) -> None:
    add_common(learn, problems=True, passes=True, compiler=True, seed=True)
    add_l2(learn)
    learn.add_argument(
        "--only",
        metavar="N=..,dtype=..",
        help="learn only for problems with these values (default: all; other rules stay)",
    )
    learn.add_argument(
        "--points",
        type=positive,
        default=12,
        metavar="N",
        help="training problems per rule, including the tuned ones (default: %(default)s)",
    )
    learn.add_argument(
        "--time",
        type=duration,
        metavar="60s",
        help="time for learning, --held-out excluded: 90, 60s, 5m (default: no limit)",
    )
    learn.add_argument(
        "--searches",
        type=count,
        default=1,
        metavar="N",
        help="short searches per rule, on training problems far from the tuned ones; their best "
        "configs become candidates (default: %(default)s)",
    )
    learn.add_argument(
        "--search-time",
        type=duration,
        default=6.0,
        metavar="6s",
        help="time for each search (default: 6s)",
    )
    learn.add_argument(
        "--held-out",
        type=count,
        default=0,
        metavar="N",
        help="judge the rules on N other problems of each pass: search each, and time the rule's "
        "choice against the best config found (default: %(default)s)",
    )
    learn.add_argument(
        "--trials",
        type=positive,
        metavar="N",
        help="most trials of each search (default: 160; 12 on the host)",
    )
    learn.add_argument(
        "--trial-timeout",
        type=duration,
        default=30.0,
        metavar="30s",
        help="a trial that takes longer is killed and recorded; a certificate has six times as "
        "long (default: 30s)",
    )
    add_out(learn, "where the tuned library is")


def add_measure_check(check: argparse.ArgumentParser) -> None:
    add_common(check, problems=True, passes=True, compiler=True, seed=True, operator="rmsnorm")
    add_l2(check)
    check.add_argument(
        "--tunes",
        type=positive,
        default=3,
        metavar="T",
        help="independent tunes whose winners are compared; 1 compares none (default: %(default)s)",
    )
    check.add_argument(
        "--trials",
        type=positive,
        metavar="N",
        help="trials per problem and tune, at most (default: 160; 12 on the host)",
    )
    check.add_argument(
        "--runs",
        type=positive,
        default=5,
        metavar="R",
        help="comparisons of a kernel with itself, each in a new process (default: %(default)s)",
    )
    check.add_argument("--yaml", metavar="FILE", help="also write the result to a file")
    check.add_argument(
        "--strict", action="store_true", help="exit with 1 if a comparison misses its bar"
    )
    check.set_defaults(out="generated")


def add_coverage(coverage: argparse.ArgumentParser) -> None:
    add_common(coverage, problems=True, passes=True, compiler=True, seed=True, population=True)
    coverage.add_argument(
        "--steps",
        action="store_true",
        help="only print the dispatch step of each problem; --gpu need not be in this machine",
    )
    _add_against(coverage)
    coverage.add_argument(
        "--sample",
        type=positive,
        default=0,
        metavar="N",
        help="search N problems of each pass, and print how much slower the library's kernel is "
        "than the best config found (default: none)",
    )
    coverage.add_argument(
        "--search-time",
        type=duration,
        default=5.0,
        metavar="5s",
        help="time for each of these searches (default: 5s)",
    )
    coverage.add_argument(
        "--first-calls",
        action="store_true",
        help="also time the first call of each problem; KGEN_CACHE_DIR=$(mktemp -d) starts with "
        "an empty kernel cache",
    )
    coverage.add_argument(
        "--time",
        type=duration,
        metavar="5m",
        help="time no further problem after this time, which passes share evenly; problems are "
        "then timed in an order drawn by --seed (default: all are timed, in order)",
    )
    add_out(coverage, "where the library is")
    coverage.add_argument("--yaml", metavar="FILE", help="write all results to a file")
