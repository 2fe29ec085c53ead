import { setTimeout as sleep } from 'node:timers/promises';
import { BatchesService, type BatchMember, type JobCommand, JobsService, LeaseModule } from '@leasehold/nestjs';
import type { INestApplicationContext } from '@nestjs/common';
import { Module } from '@nestjs/common';
import { NestFactory } from '@nestjs/core';
import { Client } from 'pg';
import { TcpProxy } from '../support/tcp-proxy';
import type { Work } from './chaos-worker';
import type { Ledger } from './ledger';
import { Random } from './random';
import { QUERY_TIMEOUT, SETTINGS } from './settings';

const COMMANDS: readonly JobCommand[] = [
  'cancel',
  'cancel',
  'pause',
  'resume',
  'retry',
  'forceCancel',
  'runNow',
  'reprioritise',
];
const KIND = 'chaos.work';

/** Those who enqueue and steer, all in one process that no fault kills; what the database does to it is no exception to anything. */
export class Clients {
  private readonly tasks: Promise<void>[] = [];
  private readonly stopping = new AbortController();
  /** Jobs whose enqueue was answered, the last ones, to be steered. */
  private readonly known: string[] = [];

  private constructor(
    private readonly app: INestApplicationContext,
    /** Theirs to the database. */
    readonly line: TcpProxy,
    private readonly url: string,
    private readonly ledger: Ledger,
    private readonly seed: number,
  ) {}

  static async open(url: string, ledger: Ledger, seed: number): Promise<Clients> {
    const line = await TcpProxy.start(url);
    const connection = { url: line.url(url), queryTimeout: QUERY_TIMEOUT };
    @Module({ imports: [LeaseModule.forRoot({ ...SETTINGS, role: 'producer', connection, migrate: true })] })
    class ClientModule {}
    const app = await NestFactory.createApplicationContext(ClientModule, { logger: ['fatal'], abortOnError: false });
    return new Clients(app, line, connection.url, ledger, seed);
  }

  get jobs(): JobsService {
    return this.app.get(JobsService);
  }

  start(): void {
    this.loop('plain', 40, (random) => this.plain(random));
    this.loop('transactional', 60, (random) => this.transactional(random));
    this.loop('keyed', 60, (random) => this.keyed(random));
    this.loop('batches', 400, (random) => this.batch(random));
    this.loop('operator', 30, (random) => this.steer(random));
  }

  /** A job that ends whatever process runs it. */
  async poison(): Promise<string> {
    const id = await this.jobs.enqueue(KIND, { ms: 0, poison: true } satisfies Work, OPTIONS);
    await this.ledger.ack([id], 'poison');
    return id;
  }

  /** No more jobs and commands. */
  async stop(): Promise<void> {
    this.stopping.abort();
    await Promise.all(this.tasks);
  }

  async close(): Promise<void> {
    await this.app.close();
    await this.line.close();
  }

  private loop(name: string, everyMs: number, act: (random: Random) => Promise<void>): void {
    const random = Random.for(this.seed, name);
    const run = async (): Promise<void> => {
      while (!this.stopping.signal.aborted) {
        // What is not answered is not promised.
        await act(random).catch(() => undefined);
        await sleep(everyMs * (0.5 + random.next()), undefined, { signal: this.stopping.signal }).catch(
          () => undefined,
        );
      }
    };
    this.tasks.push(run());
  }

  private async remember(ids: string[], what: string, dueMs = 0): Promise<void> {
    await this.ledger.ack(ids, what, dueMs);
    this.known.push(...ids);
    this.known.splice(0, Math.max(0, this.known.length - 500));
  }

  private async plain(random: Random): Promise<void> {
    if (random.chance(0.3)) {
      const works = Array.from({ length: random.int(2, 50) }, () => workOf(random));
      return this.remember(await this.jobs.enqueueMany(KIND, works, OPTIONS), 'many');
    }
    const delay = random.chance(0.2) ? random.int(0, 3000) : 0;
    await this.remember([await this.jobs.enqueue(KIND, workOf(random), { ...OPTIONS, delay })], 'one', delay);
  }

  /** The promise stands in the same transaction: with a rollback there is neither. */
  private async transactional(random: Random): Promise<void> {
    const client = new Client({
      connectionString: this.url,
      application_name: 'chaos producer',
      connectionTimeoutMillis: 5000,
    });
    client.on('error', () => undefined);
    await client.connect();
    const [works, back, late] = [
      Array.from({ length: random.int(1, 10) }, () => workOf(random)),
      random.chance(0.3),
      random.int(0, 400),
    ];
    try {
      await client.query('BEGIN');
      const ids = await this.jobs.enqueueMany(KIND, works, { ...OPTIONS, client });
      await client.query(`INSERT INTO ledger.acks (job, what) SELECT unnest($1::bigint[]), $2`, [
        ids,
        back ? 'never' : 'transactional',
      ]);
      await sleep(late);
      await client.query(back ? 'ROLLBACK' : 'COMMIT');
    } finally {
      await client.end().catch(() => undefined);
    }
  }

  private async keyed(random: Random): Promise<void> {
    const key = `k${random.int(1, 30)}`;
    const keyMode = random.pick(['ignore', 'replace', 'serial', { throttle: 500 }, { debounce: 300 }] as const);
    const { id } = await this.jobs.enqueueUnique(KIND, workOf(random), { ...OPTIONS, key, keyMode });
    await this.remember([id], 'keyed');
  }

  private async batch(random: Random): Promise<void> {
    const size = random.int(2, 40);
    const members = Array.from({ length: size }, (_, i): BatchMember => {
      const dependsOn = i > 0 && random.chance(0.4) ? [`m${random.int(0, i - 1)}`] : [];
      return { handler: KIND, payload: workOf(random), name: `m${i}`, dependsOn, ...OPTIONS };
    });
    const { id, jobIds } = await this.app.get(BatchesService).create('chaos', members, {
      failFast: random.chance(0.2),
      onFinished: { handler: 'chaos.closing', maxCrashes: 1000 },
    });
    await this.ledger.write(`INSERT INTO ledger.batches (batch, members) VALUES ($1, $2)`, [id, size]);
    await this.remember(jobIds, 'member');
  }

  private async steer(random: Random): Promise<void> {
    const [command, at] = [random.pick(COMMANDS), random.next()];
    const id = this.known[Math.floor(at * this.known.length)];
    if (id === undefined) return;
    const answer = await this.command(command, id);
    await this.ledger.write(`INSERT INTO ledger.commands (job, command, answer) VALUES ($1, $2, $3)`, [
      id,
      command,
      answer,
    ]);
  }

  private async command(command: JobCommand, id: string): Promise<string> {
    try {
      const { jobs } = this;
      const { state, requested } =
        command === 'reprioritise' ? await jobs.reprioritise(id, 5) : await jobs[command](id);
      return requested ? 'requested' : (state ?? 'deleted');
    } catch (error) {
      return (error as { code?: string }).code ?? 'ERROR';
    }
  }
}

const OPTIONS = { maxAttempts: 8, maxCrashes: 4, deadline: '20s', backoff: { base: '50ms', max: '500ms' } } as const;

function workOf(random: Random): Work {
  const [ms, kind] = [random.int(0, 1) * random.int(0, 400), random.next()];
  if (kind < 0.03) return { ms, fatal: true };
  if (kind < 0.1) return { ms, failures: random.int(1, 2) };
  return { ms, effect: kind < 0.4, checkpoint: kind > 0.8 };
}
