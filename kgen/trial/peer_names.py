"""Checks that the peers that a user names are available on this machine."""

from __future__ import annotations

from collections.abc import Sequence

from kgen.errors import CatalogueError, suggest
from kgen.trial.handle import WorkerHandle
from kgen.worker import PeerNames


def check_peer_names(
    names: Sequence[str], operator: str, passes: Sequence[str], worker: WorkerHandle
) -> None:
    """Check that each named peer exists for one of the passes.

    Args:
        names: Names of peers.
        operator: Name of the operator, for the message.
        passes: Passes of the operator; a peer needs to exist for only one of them.
        worker: The worker, which knows the packages that are installed where kernels run.
    Raises:
        CatalogueError: If none of the passes has a peer with a given name.
    """
    offered = {name for p in passes for name in worker.peer_names(PeerNames(p)).names}
    for name in names:
        if name not in offered:
            raise CatalogueError(
                f"{operator} has no peer '{name}' on this machine\n  {suggest(name, offered)}\n"
                "  a peer that needs a package is available only where the package is installed"
            )
