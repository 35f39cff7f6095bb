"""The training loop: the whole step on one screen.

Nothing here knows about FSDP2, collectives or a recipe: those were joined to the model once, in
`trainer.run`. No line waits for the device except those that report.
"""

import torch

from parallel.fsdp import set_last_micro_batch
from parallel.norm import clip, global_norm
from trainer.data import Step
from trainer.errors import DONE, STOPPED
from trainer.evaluate import evaluate
from trainer.optim import learning_rate
from trainer.run import Job
from trainer.watch.interval import Outcome


def train(job: Job) -> int:
    """Run to the last step, or until asked to stop; returns the exit code."""
    trainer, state = job.config.trainer, job.state
    if job.evaluation_due() and not run_evaluation(job):
        return finish(job, STOPPED)  # again: the evaluation that a stop interrupted
    for step in job.clock.each("data", job.steps()):
        if step.stop:
            return finish(job, STOPPED)
        number = state.step + 1
        with job.watch.profile.step(number), job.watch.inside.step(number, job.model):
            outcome = update(job, step)
        state.step += 1
        state.samples += trainer.batch_size
        if job.steering is not None:
            job.steering.after_step(state.step, outcome.norm)
        job.check()
        job.watch.step(state.step, step, outcome, job.guard)
        job.report_saves()
        if job.evaluation_due() and not run_evaluation(job):
            return finish(job, STOPPED)
        if job.saver.due(state.step):
            job.watch.flush(job.guard)  # no row is about both sides of a checkpoint
            job.save()
    return finish(job, DONE)


def run_evaluation(job: Job) -> bool:
    """Evaluate and report, and save what is the best so far; False if asked to stop before the end."""
    job.watch.flush(job.guard)  # a save may follow, and no row is about both sides of it
    with job.watch.paused("evaluation"):
        figures = evaluate(job)
    if figures is None:
        return False
    job.state.evaluated = job.state.step
    best = job.note_if_best(figures)
    job.watch.evaluation(job.state.step, figures, best)
    if best:
        job.save(again=True)  # one of this step, from before the evaluation, does not know it
    return True


def update(job: Job, step: Step) -> Outcome:
    """One optimizer step.

    FSDP2 averages gradients over ranks and the loss is a sum over this rank's labels, so each
    micro-batch's loss is scaled by ranks / labels: the result is the mean over all labels of the step.
    """
    model, optimizer, optim, clock = job.model, job.optimizer, job.config.optim, job.clock
    scale = job.plan.averaging_ranks / max(step.count, 1)
    total = torch.zeros((), device=job.device)
    for number, micro in enumerate(step.micros, start=1):
        set_last_micro_batch(
            model,
            last=number == len(step.micros),
            every=job.config.parallel.reduce_every_micro_batch,
        )
        with clock("forward"):
            loss = job.task.loss(model, micro)
        with clock("backward"):
            (loss * scale).backward()
        total += loss.detach()
    with clock("optimizer"):
        grads = [p.grad for p in job.parameters if p.grad is not None]
        norm, sums = global_norm(grads, extra=total.reshape(1))
        job.watch.inside.gradients(model)
        mean_loss = sums[0] / max(step.count, 1)
        if optim.max_norm:
            clip(grads, norm, optim.max_norm)
        job.guard.skip_unless_finite(optimizer, mean_loss, norm, job.state.step + 1, step.samples)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(optim, job.state.step + 1, job.plan.steps, group["peak"])
        optimizer.step()
        optimizer.zero_grad()
    own_count = sum(job.task.count(micro) for micro in step.micros)
    return Outcome(mean_loss, norm, total, own_count)


def finish(job: Job, code: int) -> int:
    """Save what is not saved yet, wait until it is on the disk, report, and say goodbye."""
    job.watch.flush(job.guard)
    if job.state.step and (code == STOPPED or job.config.checkpoint.at_end):
        job.save()
    job.finish_save()
    job.watch.close(job.state.step, code, job.saver.checkpoints.newest())
    return code
