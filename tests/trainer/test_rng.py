import random

import numpy as np
import torch

from trainer.rng import rng_state, set_rng_state

CPU = torch.device("cpu")


def test_random_states_come_back():
    random.seed(3)
    np.random.seed(4)
    torch.manual_seed(5)
    random.gauss(0, 1), np.random.standard_normal()  # both now hold a second value back
    state = rng_state(CPU)

    def draw():
        return (
            random.gauss(0, 1),
            random.random(),
            np.random.standard_normal(),
            torch.rand(2).tolist(),
        )

    first = draw()
    draw()
    set_rng_state(state, CPU)
    assert draw() == first
