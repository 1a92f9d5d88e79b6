"""Run folders as pandas frames and matplotlib figures, for the notebooks here and for others.

Frames are plain; figures are `matplotlib.figure.Figure` objects made without pyplot, so nothing here has global state.
Needs the extra `notebooks`. No other part of the package imports this one.
"""

from lit_cifar.errors import ConfigError

try:
    import pandas  # noqa: F401
except ImportError as error:
    raise ConfigError(
        "lit_cifar.analysis needs pandas, which is not installed", remedy="pip install 'lit-cifar[notebooks]'"
    ) from error
