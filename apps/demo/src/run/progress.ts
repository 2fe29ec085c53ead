import { setTimeout as sleep } from 'node:timers/promises';
import type { JobState, JobsService } from '@leasehold/nestjs';
import { DemoError } from '../errors';
import type { Timeline } from '../output/timeline';

const LOOK_MS = 200;
/** Longer than any pause that the faults cause. */
const STALLED_MS = 90_000;

/** Follows the jobs' states in the database, which a killed worker cannot falsify as it could a count of messages. */
export class Progress {
  finished = 0;

  constructor(
    private readonly jobs: JobsService,
    private readonly total: number,
    private readonly timeline: Timeline,
  ) {}

  get done(): boolean {
    return this.finished >= this.total;
  }

  /** Resolves when every job has ended. @throws when nothing has ended for too long */
  async untilDone(signal: AbortSignal): Promise<void> {
    let changedAt = performance.now();
    while (!this.done) {
      await sleep(LOOK_MS, undefined, { signal });
      const before = this.finished;
      const counts = await this.look();
      if (this.finished > before) changedAt = performance.now();
      else if (performance.now() - changedAt > STALLED_MS) {
        throw new DemoError(`No job has ended for ${STALLED_MS / 1000} s: ${JSON.stringify(counts)}`);
      }
    }
  }

  /** Jobs that no worker has yet. */
  async queued(): Promise<number> {
    return (await this.look()).ready;
  }

  private async look(): Promise<Record<JobState, number>> {
    const counts = await this.jobs.counts();
    this.finished = counts.completed + counts.failed + counts.cancelled;
    this.timeline.progress(this.finished, this.total, counts.running, counts.failed);
    return counts;
  }
}
