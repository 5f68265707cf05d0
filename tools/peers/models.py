"""Where model files are."""
import os
import pathlib

from .system import PeerFailed

DEFAULT = "SmolLM2-135M-Instruct.Q4_1.gguf"


def default_model(given):
    """The file given, or the default model where tools/test keeps it."""
    folders = [os.environ.get("DUNLIN_TEST_MODELS"), pathlib.Path.home() / ".cache/dunlin/models"]
    places = [given] if given else [pathlib.Path(f) / DEFAULT for f in folders if f]
    for place in places:
        if place.is_file():
            return place.resolve()
    raise PeerFailed("no model at " + " or ".join(map(str, places)) + "; give a FILE.gguf, "
                     "or fetch it with `dunlin pull smollm2-135m-instruct`")
