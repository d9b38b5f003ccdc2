"""The credential of a source: the operator's copy of a Secret, read when it is needed and kept by nobody.

Read again for every attempt, so that a renewed token works without a restart. No value gets into an error.
"""

from __future__ import annotations

import base64
from binascii import Error as NotBase64
from dataclasses import dataclass

from dlo_kube.errors import Denied, KubeError
from dlo_kube.gateway import Gateway
from dlo_kube.kinds import SECRET

from dlo_agent.errors import SourceProblem


@dataclass(frozen=True)
class Credentials:
    """The Secrets of one namespace."""

    gateway: Gateway
    namespace: str

    def read(self, name: str, *keys: str) -> tuple[str, ...]:
        """The values of ``keys`` in the Secret ``name``.

        Raises SourceProblem: SourceUnauthorized where there is no such credential or this agent may not read
        it, SourceUnreachable where the API server gives no answer.
        """
        place = f"Secret {self.namespace}/{name}"
        try:
            found = self.gateway.get(SECRET, name, self.namespace)
        except Denied as error:
            raise SourceProblem(
                f"{place}: this agent may not read it", hint=error.hint, code="SourceUnauthorized"
            ) from error
        except KubeError as error:
            raise SourceProblem(
                f"{place}: it cannot be read now ({error.code})",
                hint="it is tried again",
                code="SourceUnreachable",
            ) from error
        data = (found or {}).get("data") or {}
        absent = [key for key in keys if not data.get(key)]
        if absent:
            what = f"it has no {absent[0]}" if found is not None else "it is not there"
            raise SourceProblem(
                f"{place}: {what}",
                hint="the operator copies it from the Secret that spec.model.source names: check that one",
                code="SourceUnauthorized",
            )
        try:
            return tuple(base64.b64decode(data[key], validate=True).decode("ascii").strip() for key in keys)
        except (NotBase64, UnicodeDecodeError):
            raise SourceProblem(
                f"{place}: its value is no plain text",
                hint="store the token itself",
                code="SourceUnauthorized",
            ) from None
