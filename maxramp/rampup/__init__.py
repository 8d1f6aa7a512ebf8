"""The batch-size schedule as data. Imports no JAX."""

from maxramp.rampup.schedule import RampupBatchManager, Stage, Start

__all__ = ["RampupBatchManager", "Stage", "Start"]
