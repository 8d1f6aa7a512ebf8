"""Folders' models as transformers computes them, and how near ours are."""

import numpy as np
from later import Later
from small_models import TOKENS_BT

torch = Later("torch")
transformers = Later("transformers")
TOLERANCE = 1e-5  # of the range of the logits


def opened(folder):
    """Opens a folder's model as transformers does, without a flag but the dtype."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def theirs(model, tokens_BT: np.ndarray = TOKENS_BT) -> np.ndarray:
    """Returns the logits of a model of transformers or PEFT."""
    with torch.no_grad():
        return model(torch.tensor(tokens_BT, dtype=torch.long)).logits.numpy()


def assert_near(actual: np.ndarray, expected: np.ndarray, tolerance: float = TOLERANCE) -> None:
    np.testing.assert_allclose(actual, expected, atol=tolerance * np.ptp(expected), rtol=0)
