"""The factor on an fp16 loss that protects small gradients from underflow and large ones from overflow.

    window 3, hysteresis 2       . clean step    ! overflow: the step is skipped

    step    .   .   .   .   .   !   .   !   !   .   .   .   .
    scale   8   8   8  16  16  16  16  16   8   4   4   4   8      in use during the step
    left    2   2   2   2   2   2   1   1   1   1   1   1   2      overflows until the scale is halved

The scale is a plain number, equal on every rank because every rank sees the same overflow; nothing here communicates.
"""

from typing import Any

from megazero.config.schema import PrecisionConfig


class LossScaleError(RuntimeError):
    """Gradients are not finite even at the smallest loss scale."""


class LossScaler:
    """Loss scale of the current step (Micikevicius et al. 2018, section 3.2), with DeepSpeed's parameters.

    After `hysteresis` overflows since the last refill, the scale is halved, and again by each further one.  Earlier
    overflows only skip their step.  With a constant `loss_scale` the other keys have no effect.

    Unscale the gradients with `scale` first, then call `update`, which sets the next step's scale.

    One difference from DeepSpeed 0.19: there the first growth after the start or after an overflow takes window + 1
    clean steps and later ones take `window`.  Here it is always `window`, as documented.
    """

    def __init__(self, config: PrecisionConfig) -> None:
        self._config, self.dynamic = config, config.loss_scale == 0
        self.scale = 2.0**config.initial_scale_power if self.dynamic else config.loss_scale
        self.skipped_steps = self._clean_steps = 0
        self._hysteresis_left = config.hysteresis

    def update(self, overflowed: bool) -> None:
        """Set the scale of the next step.

        Args:
            overflowed: a gradient of some rank was not finite, and the step was skipped.

        Raises:
            LossScaleError: the scale would have to fall below its minimum.
        """
        self.skipped_steps += int(overflowed)
        if not self.dynamic:
            return
        self._clean_steps = 0 if overflowed else self._clean_steps + 1
        if not overflowed:
            due = self._clean_steps == self._config.loss_scale_window
            if due:
                self.scale *= 2
                self._clean_steps = 0
            if due or self._config.consecutive_hysteresis:
                self._hysteresis_left = self._config.hysteresis
        elif self._hysteresis_left > 1:
            self._hysteresis_left -= 1
        elif self.scale > self._config.min_loss_scale:
            self.scale = max(self.scale / 2, self._config.min_loss_scale)
        else:
            raise LossScaleError(
                f"gradients overflow at loss scale {self.scale:g}, the smallest allowed (min_loss_scale), after "
                f"{self.skipped_steps} skipped steps in all: no scale makes them finite. Look for inf or NaN in the "
                f"loss and the data, lower the learning rate or train in bf16; if the loss is sound, lower "
                f"min_loss_scale"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the plain numbers from which a run resumes as if it had not stopped."""
        return {
            "scale": self.scale,
            "skipped_steps": self.skipped_steps,
            "clean_steps": self._clean_steps,
            "hysteresis_left": self._hysteresis_left,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict`.  This run's configured limits take precedence over the saved numbers."""
        self.skipped_steps = int(state["skipped_steps"])
        if self.dynamic:
            self.scale = max(float(state["scale"]), self._config.min_loss_scale)
            self._clean_steps = min(int(state["clean_steps"]), self._config.loss_scale_window - 1)
            self._hysteresis_left = min(int(state["hysteresis_left"]), self._config.hysteresis)
