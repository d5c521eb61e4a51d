"""One exception tree, so that a script can catch as wide or as narrow as it needs.

UnidistError
├── UsageError                 an argument, option or call is wrong (also a ValueError)
│   ├── UnknownBackend         no backend of that name is registered
│   ├── UnknownOption          the backend has no such option; the nearest right name is given
│   ├── UnsupportedOperation   the backend declares that it cannot do this, and says what to do instead
│   └── StateError             the right call at the wrong time: after close, outside `with`, twice
├── WorldError                 the cluster environment is partial or contradicts itself; the variable is named
│   └── StaleRendezvous        a file:// rendezvous left behind by an earlier run
├── BackendUnavailable         the backend is known, its framework is not installed (also an ImportError)
├── SetupError                 an environment could not be built
├── LaunchError                the processes of a job could not be started
├── CheckpointError            a checkpoint cannot be written, or is damaged, not unidist's, or another model's
└── CommunicationError         the ranks cannot work together any more
    ├── RanksDisagree          they were about to do different things; who wanted what is listed
    ├── RanksMissing           some did not arrive in time; they are listed
    └── PeerFailed             another rank raised or died
"""


class UnidistError(Exception):
    """Base of every error that unidist raises on purpose."""


class UsageError(UnidistError, ValueError):
    pass


class UnknownBackend(UsageError):
    pass


class UnknownOption(UsageError):
    pass


class UnsupportedOperation(UsageError):
    pass


class StateError(UsageError):
    pass


class WorldError(UnidistError):
    pass


class StaleRendezvous(WorldError):
    pass


class BackendUnavailable(UnidistError, ImportError):
    pass


class SetupError(UnidistError):
    pass


class LaunchError(UnidistError):
    pass


class CheckpointError(UnidistError):
    pass


class CommunicationError(UnidistError):
    pass


class RanksDisagree(CommunicationError):
    pass


class RanksMissing(CommunicationError):
    pass


class PeerFailed(CommunicationError):
    pass


def single_row(rank: int, size: int) -> UsageError:
    """For backends whose batch normalisation breaks at a batch of one row: with an error that does not tell where it
    comes from, or by running statistics that are no numbers from then on."""
    synced = " or prepare the model with sync_batchnorm=True, which normalises over all ranks," if size > 1 else ""
    return UsageError(
        f"rank {rank} of {size} has a single row to train on, and batch normalisation needs at least two: the last "
        "global batch of a pass is shared out over the ranks, and this is what was left for this one. Give the loader "
        f"tail='drop',{synced} or choose a batch size that leaves more."
    )
