"""The text of a configuration file, before jsonargparse reads it."""

from collections.abc import Set

import yaml  # type: ignore[import-untyped]

from lit_cifar.errors import ConfigError, one_line

_REMEDY = "write settings as in RUN/config.yaml"


def check_text(text: str, *, file: str, sections: Set[str]) -> None:
    """Raise a `ConfigError` for a text that is no YAML, holds no settings, or holds one twice.

    Of two the first would not count. Each of `sections` must have settings, which all lines that are comments are not.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"--config={file}: {one_line(error)}", remedy=_REMEDY) from error
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"--config={file} holds no settings", remedy=_REMEDY)
    _check(root, "", sections, file)


def _check(mapping: yaml.MappingNode, prefix: str, sections: Set[str], file: str) -> None:
    seen = set()
    for key, value in mapping.value:
        name, line = f"{prefix}{key.value}", key.start_mark.line + 1
        if name in seen:
            raise ConfigError(f"--config={file} holds {name} again in line {line}", remedy="leave one of the two out")
        seen.add(name)
        if name in sections and isinstance(value, yaml.MappingNode):
            _check(value, f"{name}.", sections, file)
        elif name in sections and value.tag != "tag:yaml.org,2002:str":  # which may name a file
            raise ConfigError(f"--config={file} has no settings of {name} in line {line}", remedy=_REMEDY)
