"""The text of a configuration file, before jsonargparse reads it."""

from collections.abc import Iterator, Set

import yaml  # type: ignore[import-untyped]

from lit_cifar.errors import ConfigError, one_line

_REMEDY = "write settings as in RUN/config.yaml"


def completed(text: str, *, file: str, sections: Set[str]) -> str:
    """`text` with `{}` for each of `sections` that has nothing in it, as where all of its lines are comments.

    Raises:
        ConfigError: It is no YAML, holds no settings, or holds one twice, of which the first would not count.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"--config={file}: {one_line(error)}", remedy=_REMEDY) from error
    if root is None:
        return "{}"
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"--config={file} holds no settings", remedy=_REMEDY)
    for node in sorted(_empty(root, "", sections, file), key=lambda node: -node.start_mark.index):
        text = f"{text[: node.start_mark.index]} {{}}{text[node.end_mark.index :]}"
    return text


def _empty(mapping: yaml.MappingNode, prefix: str, sections: Set[str], file: str) -> Iterator[yaml.Node]:
    """The values of `sections` that are null; a `ConfigError` for a name that is there twice, and for other values."""
    seen = set()
    for key, value in mapping.value:
        name = f"{prefix}{key.value}"
        if name in seen:
            line = key.start_mark.line + 1
            raise ConfigError(f"--config={file} holds {name} again in line {line}", remedy="leave one of the two out")
        seen.add(name)
        if name in sections and value.tag == "tag:yaml.org,2002:null":
            yield value
        elif name in sections and isinstance(value, yaml.MappingNode):
            yield from _empty(value, f"{name}.", sections, file)
        elif name in sections and value.tag != "tag:yaml.org,2002:str":  # which may name a file
            problem = f"--config={file} has no settings of {name} in line {key.start_mark.line + 1}"
            raise ConfigError(problem, remedy=_REMEDY)
