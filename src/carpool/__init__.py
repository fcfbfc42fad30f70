"""carpool lets many deep-learning training jobs share GPUs, so that all finish sooner with the same results."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import carpool.runtime.data.datasets as datasets
    from carpool.runtime.engine.stop_criteria import Stop
    from carpool.runtime.engine.training import Report, Training
    from carpool.runtime.state.digest import digest
    from carpool.runtime.worker.session import session
    from carpool.service.client import Client

__version__ = "0.2.0.dev0"
__all__ = ["Client", "Report", "Stop", "Training", "__version__", "datasets", "digest", "session"]

# Where the public names live: imported when first used, so that `import carpool` stays light. Client needs no torch.
_LAZY = {
    "Client": "carpool.service.client",
    "Report": "carpool.runtime.engine.training",
    "Stop": "carpool.runtime.engine.stop_criteria",
    "Training": "carpool.runtime.engine.training",
    "datasets": "carpool.runtime.data.datasets",
    "digest": "carpool.runtime.state.digest",
    "session": "carpool.runtime.worker.session",
}


def __getattr__(name: str) -> object:
    """Import a public name on first use, with advice if torch is missing."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(_LAZY[name])
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"carpool.{name} needs torch. Install it with: pip install 'carpool[torch]'") from error
    value = globals()[name] = module if name == "datasets" else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
