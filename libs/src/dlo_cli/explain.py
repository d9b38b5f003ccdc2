"""``dlo explain NAME``: why a DiffusionDeployment of a cluster is not ready, or what backs it."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from dlo_cli.access import Where, open_cluster
from dlo_cli.cluster import read_around, read_deployment
from dlo_cli.console import Console
from dlo_cli.errors import UsageError
from dlo_cli.explain_text import lines
from dlo_cli.explanation import Explanation, explain


class Form(StrEnum):
    """How an explanation is printed."""

    TEXT = "text"
    JSON = "json"


@dataclass(frozen=True)
class ExplainOptions:
    """What the command line says beside the cluster."""

    name: str
    operator_namespace: str | None = None
    output: Form = Form.TEXT


def explain_deployment(options: ExplainOptions, where: Where, console: Console) -> None:
    """Print the explanation. Raises CliError where there is nothing to explain."""
    kind, _, name = options.name.rpartition("/")
    if kind not in (
        "",
        "ddep",
        "diffusiondeployment",
        "diffusiondeployments",
        "diffusiondeployments.dlo.dev",
    ):
        raise UsageError(f"{options.name} is no DiffusionDeployment", hint="give the name of one")
    if not name:
        raise UsageError("the name is empty", hint="give the name of a DiffusionDeployment")
    with open_cluster(where) as cluster:
        deployment = read_deployment(cluster.gateway, name, cluster.namespace)
        seen = read_around(
            cluster.gateway, cluster.engines, deployment, datetime.now(UTC), options.operator_namespace
        )
    show(explain(seen, operator_namespace=options.operator_namespace), options.output, console)


def show(found: Explanation, output: Form, console: Console) -> None:
    """Print an explanation on standard output."""
    if output is Form.JSON:
        console.result(json.dumps(found.to_json(), indent=2))
    else:
        console.styled(lines(found, console.width()))
