"""Starting fast. A run of a few seconds is mostly imports, in the launcher and again on every rank."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager

# At the very end everything is to be taken apart, or extension modules report leaks.
atexit.register(gc.unfreeze)


@contextmanager
def importing() -> Iterator[None]:
    """Import without looking for garbage: what modules define stays, and there is a lot of it.

    torch and transformers import a fifth faster. What is there at the end is left out of later
    collections, too.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
