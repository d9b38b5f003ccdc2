"""What headers tell of a model: the sizes that a plan is made of. Reads no tensor and hashes nothing."""

from dlo_api.planned import FilesFacts, LayoutFacts, ModelFacts, Residency
from dlo_api.topology import weight_group
from dlo_api.v1alpha1 import DiffusionDeploymentSpec
from dlo_cache.image_plan import plan_images
from dlo_cache.residency import slot_bytes, spread

from dlo_cli.model import Model

SLOTS = 2
"""What the engine takes where `engine.extraArgs` names no number."""


def model_facts(model: Model, spec: DiffusionDeploymentSpec) -> ModelFacts:
    """Sizes of every entry that the spec needs, for all tensor ranks."""
    size = spec.parallelism.tensor
    layouts: list[LayoutFacts] = []
    for streamed in model.streamed:
        component = streamed.component
        plans = plan_images(
            component.tensors,
            streamed.layout,
            dtype=spec.model.dtype,
            tensor_size=size,
            tensor_ranks=range(size),
            config=component.config,
        )
        for rank in range(size):
            layouts.append(
                LayoutFacts(
                    component=component.name,
                    tensor_rank=rank,
                    key="",
                    block_bytes=tuple(
                        plan.images[rank].data_bytes for plan in plans if plan.group is not None
                    ),
                    resident_bytes=sum(plan.images[rank].data_bytes for plan in plans if plan.group is None),
                    file_bytes=sum(plan.images[rank].nbytes for plan in plans),
                )
            )
    names = {streamed.component.name for streamed in model.streamed}
    others = [part for name, part in model.pipeline.components.items() if name not in names]
    weights = [file.size for streamed in model.streamed for file in streamed.component.weights]
    weights += [file.size for part in others for file in part.weights]
    return ModelFacts(
        architecture=model.streamed[0].component.class_name,
        source_bytes=sum(file.size for file in model.pipeline.all_files()),
        largest_file_bytes=max(weights, default=0),
        layouts=tuple(layouts),
        rest=FilesFacts(
            key="",
            file_bytes=sum(file.size for file in model.pipeline.rest_files(tuple(names))),
            weight_bytes=sum(part.tensor_bytes for part in others),
        ),
    )


def residency(spec: DiffusionDeploymentSpec, facts: ModelFacts) -> tuple[Residency, ...]:
    """Which blocks stay on the device and how large a slot is, for every tensor rank, as the engine decides it."""
    group = weight_group(spec.parallelism, spec.offload.transfer).size
    wanted = spec.offload.resident_layers
    flag = "--slots="
    named = [int(arg.removeprefix(flag)) for arg in spec.engine.extra_args if arg.startswith(flag)]
    slots = named[-1] if named else SLOTS
    decided: list[Residency] = []
    for rank in range(spec.parallelism.tensor):
        resident: dict[str, tuple[int, ...]] = {}
        largest = 0
        for entry in facts.layouts:
            if entry.tensor_rank != rank:
                continue
            count = len(entry.block_bytes) if spec.offload.mode == "None" else int(wanted)
            resident[entry.component] = spread(entry.block_bytes, min(count, len(entry.block_bytes)))
            largest = max(largest, slot_bytes(entry.block_bytes, resident[entry.component], group))
        decided.append(Residency(slots=slots, slot_bytes=largest, resident=resident))
    return tuple(decided)
