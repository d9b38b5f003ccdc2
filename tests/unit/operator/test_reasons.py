"""Every reason of every condition is made by its cause, says what to do, and costs nothing while it stands."""

from __future__ import annotations

from typing import Any

import pytest
from dlo_agent import reasons as agent_words
from dlo_api import conditions as names
from dlo_api.advice import ADVICE
from dlo_kube.kinds import DIFFUSION_DEPLOYMENT
from dlo_operator.observe import read_pod
from dlo_operator.reconcile import reports
from unit.operator.causes import CASES, Setup, old_engine, source, template_refused, with_
from unit.operator.world import World

_GOOD = {(names.PROGRESSING, "Complete"), (names.STALLED, "NotStalled")}
#: Words that the agent's modules put into status beside those that errors lead to.
_AGENTS_OWN = {
    "SourceNotFound",
    "NewerFormat",
    "IntegrityFailed",
    "InsufficientHostMemory",
    "NotUnderstood",
    "Hashing",
}


def conditions(world: World) -> list[dict[str, Any]]:
    """All of them."""
    found: list[dict[str, Any]] = world.object(DIFFUSION_DEPLOYMENT)["status"]["conditions"]
    return found


@pytest.mark.parametrize(
    ("kind", "status", "reason", "setup"),
    CASES,
    ids=[f"{number}-{case[0]}-{case[2]}" for number, case in enumerate(CASES)],
)
def test_reason(kind: str, status: str, reason: str, setup: Setup) -> None:
    """The cause is made, everybody acts, and the condition says so; all that fails says what to do."""
    world = World()
    setup(world)
    world.settle()
    assert world.condition(kind) == (status, reason)
    assert world.kubelets.started_cold == []
    assert [c["type"] for c in conditions(world)] == list(names.DEPLOYMENT_CONDITIONS)
    for condition in conditions(world):
        reasons = {reason for reasons in names.REASONS.values() for reason in reasons}
        assert condition["reason"] in reasons
        if condition["status"] != "True" and (condition["type"], condition["reason"]) not in _GOOD:
            assert " \N{EM DASH} " in condition["message"], condition
    assert len(world.object(DIFFUSION_DEPLOYMENT)["status"].get("problems", [])) <= 10
    # A template that the server refused is offered again, and refused again.
    assert world.writes(world.operate) == (1 if setup is template_refused else 0)


def test_every_reason_has_a_cause() -> None:
    """The table holds every reason of the API, and no other: one without a cause would be a promise."""
    made = {(kind, reason) for kind, _, reason, _ in CASES}
    known = {(kind, reason) for kind in names.DEPLOYMENT_CONDITIONS for reason in names.REASONS[kind]}
    copied = {names.READY, names.STALLED}
    assert known <= made
    assert {item for item in made if item[0] not in copied} <= known


@pytest.mark.parametrize(
    "word", sorted({*agent_words._REASONS.values(), agent_words.BUILD_FAILED, *_AGENTS_OWN})
)
def test_every_word_of_an_agent_has_its_place(word: str) -> None:
    """As a source's, an entry's and the storage's: a reason of the condition, and advice; the word itself stays."""
    for condition, reason in (
        (names.SOURCE_RESOLVED, reports.of_source(word)),
        (names.CACHE_READY, reports.of_entry(word)),
        (names.CAPACITY_SUFFICIENT, reports.of_storage(word)),
    ):
        assert reason in names.REASONS[condition]
        assert word in (reason, reports.spoken(word, reason, "so").split(":")[0])
    assert reports.REFUSED.get(word, "Accepted") in names.REASONS[names.ACCEPTED]
    assert word in ADVICE


def test_an_engine_of_this_release_ends_engine_too_old() -> None:
    """The corrected image is another revision: its entries are there, and it is rolled out."""
    world = World()
    old_engine("error: InvalidConfiguration: argument --mode: invalid choice: 'x' \N{EM DASH} see --help")(
        world
    )
    world.settle()
    assert world.condition("Ready") == ("False", "EngineTooOld")
    assert world.condition("Stalled") == ("True", "EngineTooOld")
    builds = sum(len(agent.builds) for agent in world.agents.values())
    world.kubelets.crash = ""
    world.change("spec.engine.image", "mine:1")
    world.settle()
    assert world.condition("Ready") == ("True", "Ready")
    assert sum(len(agent.builds) for agent in world.agents.values()) == builds


def test_a_wrong_value_is_no_old_engine() -> None:
    """The engine understood its flags and refuses what they say."""
    world = World()
    old_engine("InvalidConfiguration: --device-memory-budget is too small \N{EM DASH} give more")(world)
    world.settle()
    assert world.condition("Accepted") == ("True", "Accepted")
    assert world.condition("Ready") == ("False", "PodsCrashing")


@pytest.mark.parametrize(
    ("state", "said", "code"),
    [
        (
            {
                "lastState": {
                    "terminated": {"exitCode": 4, "message": "BadEntry: it is damaged \N{EM DASH} build it\n"}
                }
            },
            "engine: exit status 4: BadEntry: it is damaged \N{EM DASH} build it",
            "BadEntry",
        ),
        (
            {"lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}},
            "engine: exit status 137 (out of memory)",
            "",
        ),
        (
            {
                "state": {
                    "terminated": {"exitCode": 1, "message": "log line\nerror: PortInUse: 8000 is taken"}
                }
            },
            "engine: exit status 1: PortInUse: 8000 is taken",
            "PortInUse",
        ),
        (
            {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}}},
            "engine: ImagePullBackOff: Back-off pulling image",
            "",
        ),
        (
            {"lastState": {"terminated": {"exitCode": 1, "message": "2026-01-01T10:00:00 no code: here"}}},
            "engine: exit status 1: 2026-01-01T10:00:00 no code: here",
            "",
        ),
    ],
    ids=["code", "killed", "log", "image", "no code"],
)
def test_what_a_container_left_is_quoted(state: dict[str, Any], said: str, code: str) -> None:
    """Exit status, and the last line of its termination message or of its log."""
    container = {"name": "engine", "ready": False, "restartCount": 1, **state}
    pod = {"metadata": {"name": "p"}, "status": {"containerStatuses": [container]}}
    trouble = read_pod(pod, None).trouble
    assert trouble is not None
    assert (trouble.message, trouble.code) == (said, code)


@pytest.mark.parametrize(
    ("setup", "kind", "words"),
    [
        (
            with_({"spec.placement.nodeSelector": {"gpu": "big"}}),
            names.CAPACITY_SUFFICIENT,
            "label gpu is not there",
        ),
        (with_({"spec.engine.device": "Cuda"}), names.CAPACITY_SUFFICIENT, "nvidia.com/gpu"),
        (with_(storage="LocksUnsupported"), names.CAPACITY_SUFFICIENT, "LocksUnsupported"),
        (
            with_(broken="NewerFormat"),
            names.CACHE_READY,
            "NewerFormat: it did not work \N{EM DASH} bring the agents",
        ),
        (source("SourceUnsupported"), names.SOURCE_RESOLVED, "SourceUnsupported: digits cannot be read"),
    ],
    ids=["selector", "gpu", "storage", "entry", "source"],
)
def test_messages_quote_what_is_known(setup: Setup, kind: str, words: str) -> None:
    """The node's own word, the label that lacks, the resource that nobody offers."""
    world = World()
    setup(world)
    world.settle()
    assert words in world.message(kind)
