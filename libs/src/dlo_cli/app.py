"""The commands of ``dlo`` and their options. Wiring only: what a command does is in a module of its own."""

from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import Annotated

import typer
from dlo_api.crdgen import check_folder, render_all

from dlo_cli import access, cache, explain, here, plan, run
from dlo_cli.build import BuildOptions, build
from dlo_cli.checks import check_numbers, check_prompts, check_size, named_path
from dlo_cli.console import Console
from dlo_cli.errors import CliError, UsageError
from dlo_cli.interrupts import stopping
from dlo_cli.model import parse_source_roots

app = typer.Typer(
    name="dlo",
    help="Serve diffusion transformers larger than GPU memory from a verified host weight cache.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
cache_app = typer.Typer(help="Look after a host weight cache.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(cache_app, name="cache")

ManifestFile = Annotated[
    Path,
    typer.Option(
        "-f", "--file", metavar="FILE", parser=named_path, help="The manifest of a DiffusionDeployment."
    ),
]
CacheRoot = Annotated[
    Path | None,
    typer.Option(
        "--cache-root",
        metavar="DIR",
        parser=named_path,
        help="An initialised cache root. Default: the user's own, made on first use.",
    ),
]
NamedRoot = Annotated[
    Path, typer.Option("--cache-root", metavar="DIR", parser=named_path, help="The cache root.")
]
SourceRoots = Annotated[
    list[str] | None,
    typer.Option("--source-root", metavar="NAME=DIR", help="A named root of sources; may be repeated."),
]
LayoutFile = Annotated[
    Path | None,
    typer.Option(
        "--layout",
        metavar="FILE",
        parser=named_path,
        help="A layout for an architecture that is not built in.",
    ),
]
Format = Annotated[plan.Format, typer.Option("-o", "--output", help="How to print.")]
Listing = Annotated[cache.Listing, typer.Option("-o", "--output", help="How to print.")]
Key = Annotated[str, typer.Argument(metavar="KEY", help="An input key, or its first 6 or more characters.")]


@app.command("run")
def run_command(
    file: ManifestFile,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", metavar="TEXT", help="Draw this and exit; may be repeated."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Seed of every picture.")] = 0,
    steps: Annotated[int | None, typer.Option("--steps", metavar="N", help="Denoising steps.")] = None,
    size: Annotated[
        str | None, typer.Option("--size", metavar="WxH", help="Pixels, such as 1024x1024.")
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", parser=named_path, help="Where pictures go.")
    ] = Path("out"),
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Address to serve on.")
    ] = run.LOCALHOST,
    port: Annotated[
        int | None, typer.Option("--port", metavar="N", help="Port to serve on. Default: the manifest's.")
    ] = None,
    cache_root: CacheRoot = None,
    source_root: SourceRoots = None,
    layout: LayoutFile = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the engine's log lines.")] = False,
) -> None:
    """Run a manifest on this machine.

    No cluster is needed: builds the entries that lack, starts the engine, then draws the prompts, or serves
    until Ctrl-C.
    """
    prompts = tuple(prompt or ())
    check_prompts(prompts)
    check_numbers(seed=seed, steps=steps, port=port)
    check_size(size)
    options = run.RunOptions(
        file=file,
        prompts=prompts,
        seed=seed,
        steps=steps,
        size=size,
        out=out,
        host=host,
        port=port,
        cache_root=cache_root,
        layout=layout,
        verbose=verbose,
    )
    with Console() as console:
        run.run(options, parse_source_roots(source_root or ()), console, stopping)


@app.command("plan")
def plan_command(
    file: ManifestFile,
    node: Annotated[
        Path | None,
        typer.Option(
            "--node",
            metavar="FILE",
            parser=named_path,
            help="Nodes to hold it against (kubectl get node -o yaml), NodeWeightCaches beside them.",
        ),
    ] = None,
    output: Format = plan.Format.TABLE,
    source_root: SourceRoots = None,
    layout: LayoutFile = None,
) -> None:
    """Say what a manifest needs.

    Ranks, entries, disk, host and device memory, on this machine or on the nodes of a file. Reads only headers and
    builds nothing.
    """
    with Console() as console:
        plan.plan(file, parse_source_roots(source_root or ()), layout, output, console, node)


@app.command("explain")
def explain_command(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A DiffusionDeployment of the cluster.")
    ] = None,
    namespace: Annotated[
        str | None, typer.Option("-n", "--namespace", metavar="NS", help="Its namespace.")
    ] = None,
    kubeconfig: Annotated[
        Path | None,
        typer.Option(
            "--kubeconfig",
            metavar="FILE",
            parser=named_path,
            help="How to reach the cluster. Default: as kubectl does.",
        ),
    ] = None,
    context: Annotated[
        str | None, typer.Option("--context", metavar="NAME", help="A context of the kubeconfig.")
    ] = None,
    operator_namespace: Annotated[
        str | None,
        typer.Option(
            "--operator-namespace", metavar="NS", help="Where the operator runs. Default: it is found."
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "-f", "--file", metavar="FILE", parser=named_path, help="A manifest: can this machine run it?"
        ),
    ] = None,
    output: Annotated[explain.Form, typer.Option("-o", "--output", help="How to print.")] = explain.Form.TEXT,
    cache_root: CacheRoot = None,
    source_root: SourceRoots = None,
    layout: LayoutFile = None,
) -> None:
    """Say why it is not ready, or what backs it.

    With NAME: a DiffusionDeployment of a cluster, causes first. With -f: a manifest on this machine.
    """
    if (name is None) == (file is None):
        raise UsageError("give the NAME of a DiffusionDeployment, or a manifest with -f, and not both")
    with Console() as console:
        if file is not None:
            options = here.HereOptions(file=file, cache_root=cache_root, layout=layout, output=output)
            here.explain_here(options, parse_source_roots(source_root or ()), console)
        elif name is not None:
            explain.explain_deployment(
                explain.ExplainOptions(name, operator_namespace, output),
                access.Where(kubeconfig, context, namespace),
                console,
            )


@app.command("build")
def build_command(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", parser=named_path, help="The folder of a diffusers pipeline.")
    ],
    cache_root: CacheRoot = None,
    tensor: Annotated[int, typer.Option("--tensor", metavar="N", help="Tensor-parallel size.")] = 1,
    rank: Annotated[
        list[int] | None, typer.Option("--rank", metavar="R", help="Only this coordinate; may be repeated.")
    ] = None,
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="D", help="Source, bfloat16, float16 or float32.")
    ] = "Source",
    component: Annotated[
        list[str] | None,
        typer.Option("--component", metavar="NAME", help="A streamed component; may be repeated."),
    ] = None,
    variant: Annotated[
        str, typer.Option("--variant", metavar="V", help="The set of weights where a folder has several.")
    ] = "",
    layout: LayoutFile = None,
) -> None:
    """Build the entries of a model.

    All coordinates in one pass over its files. Prints the input key of each entry.
    """
    options = BuildOptions(
        model=model,
        cache_root=cache_root,
        tensor=tensor,
        ranks=tuple(rank) if rank else None,
        dtype=dtype,
        components=tuple(component or ("transformer",)),
        variant=variant,
        layout=layout,
    )
    with Console() as console:
        build(options, console, stopping)


@app.command("crds")
def crds_command(
    check: Annotated[
        Path | None,
        typer.Option("--check", metavar="DIR", parser=named_path, help="Compare with the files in a folder."),
    ] = None,
) -> None:
    """Print the CRDs, or compare them.

    The CustomResourceDefinitions of both kinds, as YAML.
    """
    if check is None:
        with Console() as console:
            console.result("---\n".join(render_all().values()).rstrip("\n"))
        return
    differing = check_folder(check)
    if differing:
        raise CliError(f"{check}: differs: {', '.join(differing)}", hint="generate them again", code="Drift")


@app.command("version")
def version_command() -> None:
    """Print the version."""
    with Console() as console:
        console.result(distribution_version("dlo-operator"))


@cache_app.command("init")
def cache_init(cache_root: NamedRoot) -> None:
    """Make a cache root.

    Tries first that its file system keeps locks and renames.
    """
    with Console() as console:
        cache.init(cache_root, console)


@cache_app.command("ls")
def cache_ls(cache_root: CacheRoot = None, output: Listing = cache.Listing.TABLE) -> None:
    """List the entries."""
    with Console() as console:
        cache.ls(cache_root, output, console)


@cache_app.command("inspect")
def cache_inspect(key: Key, cache_root: CacheRoot = None, output: Listing = cache.Listing.TABLE) -> None:
    """Show one entry.

    What it was made from, its files and its tensors.
    """
    with Console() as console:
        cache.inspect(cache_root, key, output, console)


@cache_app.command("verify")
def cache_verify(
    key: Annotated[str | None, typer.Argument(metavar="KEY", help="One entry; all when left out.")] = None,
    cache_root: CacheRoot = None,
) -> None:
    """Check every byte of the entries.

    Against the digests in their manifests. Exits 1 when one is bad.
    """
    with Console() as console:
        cache.verify(cache_root, key, console, stopping)


@cache_app.command("rm")
def cache_rm(
    key: Annotated[list[str], typer.Argument(metavar="KEY", help="Entries to remove.")],
    cache_root: CacheRoot = None,
) -> None:
    """Remove entries.

    One that an engine uses stays, and says so.
    """
    with Console() as console:
        cache.rm(cache_root, key, console)


@cache_app.command("gc")
def cache_gc(cache_root: CacheRoot = None) -> None:
    """Remove what interrupted work left.

    Files of builds and evictions that ended before their time. Entries are never touched.
    """
    with Console() as console:
        cache.gc(cache_root, console)
