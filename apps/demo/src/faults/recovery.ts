import { type JobStatus, type LeaseEvent, RESCUE_TEXT, type RescueCause } from '@leasehold/nestjs';
import { seconds } from '../output/format';
import { until } from '../run/until';
import type { WorkerProcess } from '../run/worker-process';
import type { FaultContext } from './context';

const WAY: Record<RescueCause, string> = {
  session: 'way 1 of 3',
  lease: 'way 2 of 3',
  deadline: 'way 3 of 3',
  exclusive: 'an exclusive start',
};

/** How long to wait for a re-run to end. */
const RERUN_MS = 5000;

/** Watches how the others take over what a worker held, and tells it. Make it before the blow, so that it misses nothing. */
export class Recovery {
  private readonly since = performance.now();
  private readonly claims = new Map<string, string>();
  private lost = new Map<string, JobStatus>();
  private noticed = false;
  private rescued = 0;
  private example: string | undefined;
  private exampleToken: string | undefined;
  private readonly unlisten: () => void;
  private exampleCompleted = false;

  constructor(
    private readonly context: FaultContext,
    private readonly victim: WorkerProcess,
    private readonly victimId: string,
    /** What happened to it, for "… after the kill". */
    private readonly blow: string,
  ) {
    this.unlisten = context.fleet.listen((event, worker) => this.see(event, worker));
  }

  /** @param lost what it held when it was struck */
  follow(lost: JobStatus[]): void {
    this.lost = new Map(lost.map((job) => [job.id, job]));
    // The oldest: it is claimed again first.
    this.example = lost.at(-1)?.id;
  }

  /** Resolves when the loss was noticed and every job of it is with another worker. */
  async complete(): Promise<void> {
    const { signal, timeline } = this.context;
    await until(`That somebody notices the ${this.blow}`, () => this.noticed, { signal });
    await until(
      `That the jobs of ${this.victim.name} are claimed again`,
      () => [...this.lost.keys()].every((id) => this.claims.has(id)),
      { signal },
    );
    const took = seconds(performance.now() - this.since);
    if (this.lost.size > 1)
      timeline.tell(`all ${this.lost.size} jobs are claimed again, ${took} after the ${this.blow}`, 'good');
  }

  /** Resolves when one of them has been completed by its new worker, or after a while. */
  async exampleDone(): Promise<void> {
    const { signal } = this.context;
    await until('The re-run', () => this.exampleCompleted, { signal, timeoutMs: RERUN_MS }).catch(() => undefined);
    signal.throwIfAborted();
  }

  end(): void {
    this.unlisten();
  }

  private see(event: LeaseEvent, worker: WorkerProcess): void {
    const { timeline } = this.context;
    switch (event.type) {
      case 'worker.died':
        if (event.workerId !== this.victimId) return;
        this.noticed = true;
        timeline.tell(
          `${worker.name} notices after ${seconds(performance.now() - this.since)}, by ${WAY[event.cause]}: ` +
            `"${RESCUE_TEXT[event.cause]}"`,
        );
        return;
      case 'job.rescued':
        if (event.workerId !== this.victimId) return;
        if (++this.rescued === this.lost.size) {
          const jobs = this.rescued === 1 ? 'its job is' : `its ${this.rescued} jobs are`;
          timeline.tell(`${jobs} back at the head of the queue; no attempt is spent, a crash is counted`);
        }
        return;
      case 'job.claimed':
        return this.claimed(event, worker);
      case 'job.completed':
        if (event.jobId !== this.example || event.token !== this.exampleToken) return;
        this.exampleCompleted = true;
        timeline.tell(`job ${event.jobId} completed by ${worker.name}`, 'good');
    }
  }

  private claimed(event: LeaseEvent & { type: 'job.claimed' }, worker: WorkerProcess): void {
    const before = this.lost.get(event.jobId);
    if (!before || worker === this.victim || this.claims.has(event.jobId)) return;
    this.claims.set(event.jobId, worker.name);
    if (event.jobId !== this.example) return;
    this.exampleToken = event.token;
    this.context.timeline.tell(
      `job ${event.jobId} (${this.context.fileOf(event.jobId)}) claimed again by ${worker.name}: ` +
        `attempt ${event.attempt} again, token ${event.token} instead of ${before.token}`,
    );
  }
}
