import type { LeaseEvent } from '@leasehold/nestjs';
import type { WorkerConfig } from '../worker/messages';
import { WorkerProcess } from './worker-process';

export type FleetListener = (event: LeaseEvent, worker: WorkerProcess) => void;

const STOP_MS = 10_000;

/** The worker processes of a run. */
export class Fleet {
  readonly workers: WorkerProcess[] = [];
  /** Writes of theirs that came without their lease and were refused. */
  refusedWrites = 0;
  private readonly listeners = new Set<FleetListener>();
  private stopping = false;
  private leaderId: string | undefined;

  constructor(
    private readonly config: Omit<WorkerConfig, 'name'>,
    /** Called when one ends that nobody told to. */
    private readonly onLoss: (worker: WorkerProcess, how: string) => void,
  ) {}

  /** Starts one more; `ready` of it tells when it claims. */
  start(): WorkerProcess {
    const worker = new WorkerProcess(`worker-${this.workers.length + 1}`, { ...this.config }, (event, from) =>
      this.receive(event, from),
    );
    this.workers.push(worker);
    void worker.exited.then((how) => {
      if (!this.stopping && !this.expected.has(worker)) this.onLoss(worker, how);
    });
    return worker;
  }

  /** Ends of these are no surprise. */
  readonly expected = new Set<WorkerProcess>();

  /** Those that claim and are not frozen. */
  get up(): WorkerProcess[] {
    return this.workers.filter((worker) => worker.isUp);
  }

  isLeader(worker: WorkerProcess): boolean {
    return this.leaderId !== undefined && worker.workerId === this.leaderId;
  }

  nameOf(workerId: string): string {
    return this.workers.find((worker) => worker.isKnownAs(workerId))?.name ?? workerId;
  }

  /** @returns a function that ends it */
  listen(listener: FleetListener): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  setPace(ms: number): void {
    this.config.paceMs = ms;
    for (const worker of this.workers) worker.send({ type: 'pace', ms });
  }

  /** Drains them all, and kills those that take too long. Idempotent. */
  async stop(): Promise<void> {
    this.stopping = true;
    for (const worker of this.workers) worker.kill('SIGTERM');
    const timer = setTimeout(() => this.kill(), STOP_MS);
    await Promise.all(this.workers.map((worker) => worker.exited));
    clearTimeout(timer);
  }

  /** Ends them at once. */
  kill(): void {
    this.stopping = true;
    for (const worker of this.workers) worker.kill('SIGKILL');
  }

  private receive(event: LeaseEvent, worker: WorkerProcess): void {
    if (event.type === 'job.refused') this.refusedWrites++;
    if (event.type === 'leader.acquired') this.leaderId = event.workerId;
    if (event.type === 'leader.lost' && this.leaderId === event.workerId) this.leaderId = undefined;
    for (const listener of this.listeners) listener(event, worker);
  }
}
