"""All of Hydra and OmegaConf that is used beyond their documented interface, with the reason. Import it where it is needed."""

import hydra.errors

# Hydra's state in this process: put aside while a config is composed, as a script with @hydra.main has one of its own.
from hydra.core.global_hydra import GlobalHydra

# The job of such a script around this run, whose output directory the run takes.
from hydra.core.hydra_config import HydraConfig

# The grammar of overrides and sweeps: hydra.compose reads whole configs alone.
from hydra.core.override_parser import types as parsed
from hydra.core.override_parser.overrides_parser import OverridesParser

# The resolver of the environment, put back after one that writes references as they are.
from omegaconf import OmegaConf
from omegaconf.resolvers import oc

# Hydra 1.4 warns if a version of its behaviour is named, but 1.3 demands it. OmegaConf 2.4, which comes with it,
# warns of the old name of the function that sets a resolver; the new one is another function in 2.3.
NEXT = hasattr(hydra.errors, "Hydra15MigrationWarning")
VERSION_BASE = {} if NEXT else {"version_base": "1.3"}
register_resolver = getattr(OmegaConf, "register_resolver" if NEXT else "register_new_resolver")

__all__ = ["VERSION_BASE", "GlobalHydra", "HydraConfig", "OverridesParser", "oc", "parsed", "register_resolver"]
