"""Host memory of a running engine against what `dlo plan` said, on a model of more than 1 GiB."""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from fakes.engine_entries import prepare


def plan_of(manifest: Path, model: Path) -> dict[str, Any]:
    """`dlo plan -o json`."""
    command = [sys.executable, "-m", "dlo_cli", "plan", "-f", str(manifest), "-o", "json"]
    done = subprocess.run(
        [*command, "--source-root", f"models={model.parent}"], capture_output=True, text=True, check=True
    )
    plan: dict[str, Any] = json.loads(done.stdout)
    return plan


def anonymous_bytes(pid: int) -> int:
    """RssAnon of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def mappings(pid: int, root: Path) -> tuple[int, set[tuple[str, str]]]:
    """Summed PSS of the mappings of a root's files in a process, and their device and inode numbers."""
    pss, files, counting = 0, set(), False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        word = line.split(maxsplit=1)[0]
        if word == "Pss:":
            pss += int(line.split()[1]) * 1024 if counting else 0
        elif not word.endswith(":"):
            fields = line.split(maxsplit=5)
            counting = len(fields) > 5 and fields[5].startswith(str(root))
            if counting:
                files.add((fields[3], fields[4]))
    return pss, files


def test_host_memory_is_what_the_plan_said(large_model: Path, large_manifest: Path, tmp_path: Path) -> None:
    """Growth of the ranks after their imports plus the entries' pages is within 10 % of the plan.

    Two ranks of one coordinate also share every page: summed PSS within 1.05 of one copy, same inodes.
    """
    plan = plan_of(large_manifest, large_model)
    assert plan["sharedHostBytes"] > 2**30
    handover = prepare(large_model, tmp_path / "root")
    command = [sys.executable, "-m", "dlo_engine", "serve", "--events", "--exit-with-parent"]
    command += ["--handover", str(handover), "--model-name", "large", "--device", "cpu", "--data", "2"]
    command += ["--port", "0", "--", "--default-size=16x16", "--default-steps=2", "--max-sequence-length=16"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as front:
        imported: dict[int, int] = {}
        ready: dict[str, Any] = {}
        assert front.stdout is not None
        for line in front.stdout:
            event = json.loads(line)
            assert event["event"] != "failed", event
            if event["event"] == "phase" and event["phase"] == "import":
                imported[event["rank"]] = event["details"]["rssAnonBytes"]
            if event["event"] == "ready":
                ready = event
                break
        for seed in range(2):
            body = json.dumps({"prompt": "seven", "seed": seed}).encode()
            headers = {"content-type": "application/json"}
            request = urllib.request.Request(f"{ready['url']}/v1/images/generations", body, headers)  # noqa: S310 - http on this machine
            with urllib.request.urlopen(request, timeout=300) as answer:  # noqa: S310 - as above
                assert answer.status == 200
        children = Path(f"/proc/{front.pid}/task/{front.pid}/children").read_text().split()
        ranks = [int(child) for child in children]
        assert len(ranks) == len(imported) == 2
        private = sum(anonymous_bytes(pid) for pid in ranks) - sum(imported.values())
        shares = [mappings(pid, tmp_path / "root/v1/entries") for pid in ranks]
        front.terminate()
        assert front.wait(60) == 0
    shared = sum(pss for pss, _ in shares)
    planned = plan["hostBytes"]
    assert abs(shared + private - planned) <= 0.1 * planned, (shared, private, plan)
    assert shared <= 1.05 * plan["sharedHostBytes"], (shared, plan["sharedHostBytes"])
    (layout,) = (entry.parent for entry in (tmp_path / "root/v1/entries").rglob("resident.safetensors"))
    for file in layout.glob("*.safetensors"):
        inode = str(file.stat().st_ino)
        assert all(inode in {number for _, number in files} for _, files in shares), file
