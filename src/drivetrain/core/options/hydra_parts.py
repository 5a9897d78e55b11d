"""All of Hydra and OmegaConf that is used beyond their documented interface, with the reason. Import it where it is needed."""

# Hydra's state in this process: put aside while a config is composed, as a script with @hydra.main has one of its own.
from hydra.core.global_hydra import GlobalHydra

# The job of such a script around this run, whose output directory the run takes.
from hydra.core.hydra_config import HydraConfig

# The grammar of overrides and sweeps: hydra.compose reads whole configs alone.
from hydra.core.override_parser import types as parsed
from hydra.core.override_parser.overrides_parser import OverridesParser

# The resolver of the environment, put back after one that writes references as they are.
from omegaconf.resolvers import oc

__all__ = ["GlobalHydra", "HydraConfig", "OverridesParser", "oc", "parsed"]
