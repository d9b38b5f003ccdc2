"""A real Prometheus on loopback, scraping what a test serves."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml
from clusterbin import binary

_PATIENCE_SECONDS = 30.0


@dataclass(frozen=True)
class Target:
    """One place to scrape, and the labels that the chart's monitors give it."""

    port: int
    labels: Mapping[str, str]


class Prometheus:
    """Runs while it is open; scrapes every second."""

    def __init__(self, folder: Path, targets: Sequence[Target]) -> None:
        scraped = [
            {
                "job_name": target.labels["job"],
                "honor_labels": target.labels["job"] == "dlo-operator",
                "static_configs": [{"targets": [f"127.0.0.1:{target.port}"], "labels": dict(target.labels)}],
            }
            for target in targets
        ]
        config = folder / "prometheus.yaml"
        config.write_text(
            yaml.safe_dump(
                {"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": scraped}
            )
        )
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._targets = len(targets)
        self._url = f"http://127.0.0.1:{port}"
        self._log = folder / "prometheus.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    str(binary("prometheus")),
                    f"--config.file={config}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Self:
        limit = time.monotonic() + _PATIENCE_SECONDS
        while not self._is_ready():
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < limit, self._log.read_text()
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(_PATIENCE_SECONDS)

    def wait_for_scrapes(self, count: int) -> None:
        """Returns once every target was scraped so many times from now; fails when one is not."""
        before = sum(self.query("sum_over_time(up[10m])"))
        limit = time.monotonic() + _PATIENCE_SECONDS
        while True:
            found = self.query("sum_over_time(up[10m])")
            if len(found) == self._targets and sum(found) >= before + (count + 1) * self._targets:
                return
            assert time.monotonic() < limit, f"not scraped: {self.targets()}"
            time.sleep(0.2)

    def targets(self) -> str:
        """What Prometheus says of its targets, for a failure."""
        return json.dumps(self._get("/api/v1/targets?state=active"))

    def query(self, expression: str) -> list[float]:
        """The values of all series now. Fails on an expression that Prometheus refuses."""
        answer = self._get(f"/api/v1/query?{urllib.parse.urlencode({'query': expression})}")
        assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
        result = answer["data"]["result"]
        if answer["data"]["resultType"] == "scalar":
            return [float(result[1])]
        return [float(series["value"][1]) for series in result]

    def label_values(self, label: str, metric: str) -> list[str]:
        """The values of a label on the series of a metric."""
        query = urllib.parse.urlencode({"match[]": metric})
        found: list[str] = self._get(f"/api/v1/label/{label}/values?{query}")["data"]
        return found

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=2) as answer:  # noqa: S310 - loopback
                return bool(answer.status == 200)
        except OSError:
            return False

    def _get(self, path: str) -> Any:
        try:
            with urllib.request.urlopen(f"{self._url}{path}", timeout=10) as answer:  # noqa: S310 - loopback
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return json.loads(error.read())


def finite(values: Sequence[float]) -> bool:
    """Whether there is a number among them."""
    return any(math.isfinite(value) for value in values)
