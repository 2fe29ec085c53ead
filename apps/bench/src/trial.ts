import { setTimeout as sleep } from 'node:timers/promises';
import type { AgentProcess } from './contenders/agent-process';
import type { ContenderName } from './contenders/contender';
import { type Stats, type WorkOptions, monotonicMs } from './contenders/protocol';
import type { Redis } from './environment/redis';
import type { Lab } from './lab';
import { postgresCpuUs, processCpuUs } from './measure/cpu';
import { Database } from './measure/database';
import type { ServerReading } from './measure/measurement';

const POLL_MS = 5;
/** A queue that has not got on for so long never will. */
const STALLED_MS = 60_000;
/** However slowly it still moves. */
const MOST_MS = 180_000;
/** A worker that does not stop is killed: what it would still do is not measured. */
const STOP_MS = 10_000;

/** One run of a case with one contender: its empty store, the agent that adds, the agents that work. */
export class Trial {
  private constructor(
    private readonly lab: Lab,
    readonly contender: ContenderName,
    private readonly redis: Redis | undefined,
    /** Undefined for a contender that keeps its jobs elsewhere. */
    readonly database: Database | undefined,
    /** Sets up, adds and counts. */
    readonly operator: AgentProcess,
  ) {}

  static async open(lab: Lab, contender: ContenderName, redis: Redis | undefined): Promise<Trial> {
    const database = redis ? undefined : await Database.create(lab.postgres.url, `bench_${contender}`);
    try {
      const trial = new Trial(lab, contender, redis, database, await lab.fleet.start(contender, 'operator'));
      await trial.operator.call('target', { url: trial.url });
      await trial.operator.call('setup');
      return trial;
    } catch (error) {
      await lab.fleet.endAll();
      await database?.close();
      throw error;
    }
  }

  /** Starts the adding side, and adds what the case begins with. */
  /** @param batchesOf as batches of so many members, instead of lots of jobs */
  async fill(count: number, payloadBytes = 0, batchesOf?: number): Promise<void> {
    const batch = batchesOf ?? (payloadBytes > 10_000 ? 20 : 1000);
    await this.operator.call('fill', { count, payloadBytes, batch, asBatches: batchesOf !== undefined });
  }

  /** Lets the store come to rest. */
  async rest(): Promise<void> {
    await this.database?.rest();
  }

  /** Processes that are loaded and do nothing yet. */
  async loadWorkers(count: number): Promise<AgentProcess[]> {
    const workers = await Promise.all(
      Array.from({ length: count }, (_, i) => this.lab.fleet.start(this.contender, `worker ${i + 1}`)),
    );
    await Promise.all(workers.map((worker) => worker.call('target', { url: this.url })));
    return workers;
  }

  async startWorkers(workers: AgentProcess[], options: WorkOptions): Promise<void> {
    await Promise.all(workers.map((worker) => worker.call('startWorker', options)));
  }

  async stopWorkers(workers: AgentProcess[]): Promise<void> {
    await Promise.all(
      workers.map(async (worker) => {
        const stopped = worker.call('stopWorker').catch(() => undefined);
        await Promise.race([stopped, sleep(STOP_MS, undefined, { ref: false })]);
        await this.lab.fleet.end(worker);
      }),
    );
  }

  async stats(workers: AgentProcess[]): Promise<Stats[]> {
    return Promise.all(workers.map((worker) => worker.call('stats')));
  }

  /** Resolves when the handlers of so many jobs have started. @throws Error when nothing moves any more, or too slowly */
  async untilStarted(workers: AgentProcess[], jobs: number, mostMs = MOST_MS): Promise<void> {
    let seen = -1;
    const beganAt = monotonicMs();
    let seenAt = beganAt;
    for (;;) {
      const started = startedBy(workers);
      if (started >= jobs) return;
      const dead = workers.find(({ end }) => end !== undefined);
      if (dead) await dead.call('stats'); // Throws with its last words.
      if (started > seen) {
        seen = started;
        seenAt = monotonicMs();
      } else if (monotonicMs() - seenAt > STALLED_MS) {
        throw new Error(`only ${started} of ${jobs} jobs were started, then none for ${STALLED_MS / 1000} s`);
      }
      if (monotonicMs() - beganAt > mostMs) {
        throw new Error(`only ${started} of ${jobs} jobs were started within ${mostMs / 1000} s`);
      }
      await this.pause(POLL_MS);
    }
  }

  /** Resolves when every job has ended, with the time of that. */
  async untilEmpty(): Promise<number> {
    const beganAt = monotonicMs();
    for (;;) {
      const left = await this.operator.call('remaining');
      const now = monotonicMs();
      if (left === 0) return now;
      if (now - beganAt > STALLED_MS) throw new Error(`${left} jobs do not end`);
      await this.pause(POLL_MS);
    }
  }

  async read(): Promise<ServerReading> {
    const { redis, database } = this;
    return redis || !database
      ? { cpuUs: redis && processCpuUs(redis.pid), walBytes: undefined }
      : { cpuUs: postgresCpuUs(this.lab.postgres.pid), walBytes: await database.walBytes() };
  }

  /** Waits, unless the benchmark is interrupted. */
  async pause(ms: number): Promise<void> {
    await sleep(ms, undefined, { signal: this.lab.signal });
  }

  /** Ends the adding side, so that all of its counters are seen. */
  async endOperator(): Promise<void> {
    await this.operator.call('stopProducer');
    await this.lab.fleet.end(this.operator);
  }

  async close(): Promise<void> {
    await this.lab.fleet.endAll();
    await this.database?.close();
  }

  private get url(): string {
    return this.database?.url ?? this.redis?.url ?? '';
  }
}

export const startedBy = (workers: AgentProcess[]): number =>
  workers.reduce((sum, { progress }) => sum + progress.started, 0);
