"""Asks a pod over HTTP through the API server, for whoever cannot reach the pod's own network.

Needs the right `get` on `pods/proxy`. One bounded GET a call; nothing is retried.
"""

from __future__ import annotations

import json
import time
from typing import Any, Final
from urllib.parse import quote

from kubernetes.client import ApiClient, ApiException, Configuration
from urllib3.exceptions import HTTPError

from dlo_kube.errors import Unavailable
from dlo_kube.responses import failure

_LIMIT: Final = 1_048_576
_PIECE: Final = 65_536


class PodProxy:
    """HTTP GETs to pods, through the API server of a configuration from `dlo_kube`.

    Args:
        configuration: how to reach the API server.
        seconds: limit to connect, and for each silence of an answer; twice that for all of a body.
        user_agent: what the server's audit log calls this process.
    """

    def __init__(
        self, configuration: Configuration, *, seconds: float = 5.0, user_agent: str = "dlo"
    ) -> None:
        self._client = ApiClient(configuration)
        self._client.user_agent = user_agent
        self._seconds = seconds

    def close(self) -> None:
        """Closes all connections."""
        self._client.close()  # type: ignore[no-untyped-call]

    def get_json(self, namespace: str, pod: str, port: int, path: str) -> dict[str, Any]:
        """The JSON object at `path` (begins with a slash) of what listens on the pod's port.

        Raises:
            Denied: the caller may not ask pods.
            NotFound: there is no such pod.
            Unavailable: no answer, or one that is no JSON object.
        """
        what = f"ask pod {pod}"
        target = (
            f"/api/v1/namespaces/{quote(namespace, safe='')}/pods/{quote(pod, safe='')}:{port}/proxy{path}"
        )
        request = self._client.param_serialize(
            "GET", target, header_params={"Accept": "application/json"}, auth_settings=["BearerToken"]
        )
        try:
            answer = self._client.call_api(*request, _request_timeout=(self._seconds, self._seconds)).response
            try:
                body = self._read(answer, what)
            finally:
                answer.close()
        except (HTTPError, ApiException, OSError) as error:
            raise Unavailable(f"{what}: the API server gave no answer: {error}") from error
        if answer.status != 200:
            raise failure(answer.status, body, what, answer.headers)
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            raise Unavailable(f"{what}: the answer is not JSON") from None
        if not isinstance(value, dict):
            raise Unavailable(f"{what}: the answer is not a JSON object")
        return value

    def _read(self, answer: Any, what: str) -> bytes:
        """A body, or the first part of it; what listens in a pod may drip for ever."""
        end = time.monotonic() + 2 * self._seconds
        body = bytearray()
        while len(body) < _LIMIT and (piece := answer.read1(_PIECE)):
            body += piece
            if time.monotonic() > end:
                raise Unavailable(f"{what}: the answer takes longer than {2 * self._seconds:g} s")
        return bytes(body)
