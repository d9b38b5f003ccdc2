"""Generated means generated: what is committed is what the models say."""

import subprocess
import sys
from pathlib import Path

from dlo_api.crdgen import check_folder, reference
from dlo_api.rules import NATIVE_EXTRA_FLAGS
from dlo_engine.flags import EXTRA_FLAGS

REPO = Path(__file__).parents[3]


def test_crds_are_those_of_the_models() -> None:
    """`make generate` after every change of a kind."""
    assert check_folder(REPO / "crds") == []
    assert check_folder(REPO / "charts/dlo-operator/files/crds") == []


def test_api_reference_is_that_of_the_models() -> None:
    """The page of fields is written by the same command."""
    assert (REPO / "docs/reference/api.md").read_text() == reference()


def test_error_reference_is_that_of_the_source() -> None:
    """Every code stands on the page, and none that no longer exists."""
    script = REPO / "docs/reference/make_errors.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert (REPO / "docs/reference/errors.md").read_text() == done.stdout


def test_api_and_engine_take_the_same_extra_arguments() -> None:
    """Two processes that never import each other agree on what a manifest may set."""
    assert sorted(NATIVE_EXTRA_FLAGS) == sorted(EXTRA_FLAGS)
