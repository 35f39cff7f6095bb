"""Finding the repeated blocks of a model: the units that FSDP2 gathers and frees one by one."""

from torch import nn

SMALL = 8
"""A module of less than one `SMALL`th of a block is not worth collectives of its own."""


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The children of the outermost `nn.ModuleList`s that hold parameters, in order, with names.

    A block that shares a parameter with the rest of the model is left out: a shared parameter
    must live in one FSDP2 group, and that group is then the root.
    """
    blocks: list[tuple[str, nn.Module]] = []

    def walk(name: str, module: nn.Module) -> None:
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            if isinstance(child, nn.ModuleList):
                blocks.extend(
                    (f"{path}.{index}", block)
                    for index, block in enumerate(child)
                    if any(True for _ in block.parameters())
                )
            else:
                walk(path, child)

    walk("", model)
    owners = _owners(model)
    return [
        (name, block)
        for name, block in blocks
        if all(_all_inside(owners[id(p)], name) for p in block.parameters())
    ]


def large_leaves(
    model: nn.Module, blocks: list[tuple[str, nn.Module]]
) -> list[tuple[str, nn.Module]]:
    """Modules outside the blocks that are not small beside one: untied embeddings and output layers.

    Gathered on their own, they do not hold up the first block, and the output layer's gradient does not
    wait for the embeddings'.
    """
    if not blocks:
        return []
    threshold = min(sum(p.numel() for p in block.parameters()) for _, block in blocks) / SMALL
    owners = _owners(model)
    prefixes = tuple(f"{name}." for name, _ in blocks)
    return [
        (name, module)
        for name, module in model.named_modules()
        if not (name + ".").startswith(prefixes)
        and sum(p.numel() for p in module.parameters(recurse=False)) >= threshold
        and not any(module.children())
        and all(_all_inside(owners[id(p)], name) for p in module.parameters())
    ]


def _owners(model: nn.Module) -> dict[int, list[str]]:
    """Names of the modules that hold each parameter, by the parameter's identity."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    return owners


def _all_inside(names: list[str], block: str) -> bool:
    return all(name == block or name.startswith(block + ".") for name in names)
