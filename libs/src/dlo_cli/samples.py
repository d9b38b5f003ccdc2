"""Where the product's own sample models are: the source root `samples`."""

from importlib.resources import files
from pathlib import Path


def samples_root() -> Path:
    """The folder of sample models: inside the installed package, or in the checkout of an editable install."""
    packaged = Path(str(files("dlo_cli"))) / "samples"
    return packaged if packaged.is_dir() else Path(__file__).parents[3] / "examples"
