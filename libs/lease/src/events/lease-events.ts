import { Injectable, Logger } from '@nestjs/common';
import { type Observable, Subject } from 'rxjs';
import type { InterruptionReason } from '../claim/interruption';

/** The three ways of rescue, plus the re-queueing of everything by an exclusive store at its start. */
export type RescueCause = 'session' | 'lease' | 'deadline' | 'exclusive';

interface JobRef {
  jobId: string;
  kind: string;
  queue: string;
  workerId: string;
  token: string;
  attempt: number;
}

export const jobRef = (job: Omit<JobRef, 'jobId'> & { id: string }): JobRef => ({
  jobId: job.id,
  kind: job.kind,
  queue: job.queue,
  workerId: job.workerId,
  token: job.token,
  attempt: job.attempt,
});

export type LeaseEvent =
  | ({ type: 'job.claimed' } & JobRef)
  | ({ type: 'job.started' } & JobRef)
  | ({ type: 'job.completed' } & JobRef)
  /** The handler reported an error. `place`: where the job went, `failed` = for good. */
  | ({ type: 'job.failed'; place: string; message: string } & JobRef)
  /** The job has failed for good, whatever the cause: an error, a spent budget, a lost worker. `reason` as it stands in the database. */
  | ({ type: 'job.finally-failed'; reason: string } & JobRef)
  | ({ type: 'job.snoozed' } & JobRef)
  | ({ type: 'job.stopped'; place: string } & JobRef)
  | ({ type: 'job.released' } & JobRef)
  | ({ type: 'job.interrupted'; reason: InterruptionReason } & JobRef)
  /** A run ended without its lease: its outcome was refused and changes nothing. */
  | ({ type: 'job.refused'; outcome: string } & JobRef)
  /** This process took a lease from a worker that no longer deserved it. */
  | ({ type: 'job.rescued'; cause: RescueCause; place: string; message: string } & JobRef)
  /** Somebody in this process gave a job a command (R22). `to`: its state, or 'deleted'; a running one that was asked to stop is still running. */
  | { type: 'job.steered'; command: string; jobId: string; from: string; to: string }
  /** This process has ended a batch, for this generation; with `onFinished` a job is told, whatever becomes of this process. */
  | { type: 'batch.finished'; batchId: string; name: string; status: string; generation: number }
  | { type: 'worker.registered'; workerId: string }
  /** No beat reached the database in time, or the worker was declared dead: its jobs are aborted, it registers anew. */
  | { type: 'worker.fenced'; workerId: string; message: string }
  | { type: 'worker.draining'; workerId: string }
  | { type: 'worker.stopped'; workerId: string }
  /** This process declared a worker dead. */
  | { type: 'worker.died'; workerId: string; cause: RescueCause; silentMs: number }
  | { type: 'leader.acquired'; workerId: string; epoch: string }
  | { type: 'leader.lost'; workerId: string; message: string };

type Level = 'debug' | 'log' | 'warn';

const LEVELS: Record<LeaseEvent['type'], Level> = {
  'job.claimed': 'debug',
  'job.started': 'debug',
  'job.completed': 'debug',
  'job.snoozed': 'debug',
  'job.stopped': 'log',
  'job.released': 'log',
  'job.failed': 'warn',
  'job.finally-failed': 'warn',
  'job.interrupted': 'warn',
  'job.refused': 'warn',
  'job.rescued': 'warn',
  'job.steered': 'log',
  'batch.finished': 'debug',
  'worker.registered': 'log',
  'worker.draining': 'log',
  'worker.stopped': 'log',
  'worker.fenced': 'warn',
  'worker.died': 'warn',
  'leader.acquired': 'log',
  'leader.lost': 'warn',
};

/** The life of jobs, workers and the leader as seen by this process: one log line each, and a typed stream. */
@Injectable()
export class LeaseEvents {
  private readonly subject = new Subject<LeaseEvent>();
  private readonly watchers = new Map<LeaseEvent['type'], ((event: never) => void)[]>();
  private readonly logger = new Logger('Leasehold');
  /** A subscriber that throws must not take a job down with it; rxjs reports it as an uncaught error on a later tick. */
  readonly stream: Observable<LeaseEvent> = this.subject.asObservable();

  /** Calls back for events of one type, without asking for all others as a subscription to the stream does. */
  on<T extends LeaseEvent['type']>(type: T, watcher: (event: LeaseEvent & { type: T }) => void): void {
    this.watchers.set(type, [...(this.watchers.get(type) ?? []), watcher]);
  }

  /** Whether anybody would see an event of this type. Lets hot paths skip making it. */
  wants(type: LeaseEvent['type']): boolean {
    return this.subject.observed || this.watchers.has(type) || Logger.isLevelEnabled(LEVELS[type]);
  }

  emit(event: LeaseEvent): void {
    // A leader that stops is no trouble.
    const level = event.type === 'leader.lost' && event.message === 'stopped' ? 'log' : LEVELS[event.type];
    if (Logger.isLevelEnabled(level)) this.logger[level](line(event));
    for (const watcher of this.watchers.get(event.type) ?? []) watcher(event as never);
    this.subject.next(event);
  }

  close(): void {
    this.subject.complete();
  }
}

const line = ({ type, ...fields }: LeaseEvent): string =>
  `${type} ${Object.entries(fields)
    .map(
      ([key, value]) =>
        `${key}=${typeof value === 'string' && /\s/.test(value) ? JSON.stringify(value) : String(value)}`,
    )
    .join(' ')}`;
