import 'reflect-metadata';
import {
  BatchesService,
  type Handler,
  type Job,
  JobHandler,
  JobsService,
  LeaseModule,
  type LeaseOptions,
} from '@leasehold/nestjs';
import { type DynamicModule, Inject, type INestApplicationContext, Module } from '@nestjs/common';
import { NestFactory } from '@nestjs/core';
import { ScheduleModule } from '@nestjs/schedule';
import { Client } from 'pg';
import type { About, Adapter, HeadKind, OnJob, Payload, Producer } from './contender';

/** The product as an application has it: a Nest context, `LeaseModule`, a handler class. No option is set but concurrency. */

const KIND = 'bench.job';
const UNHANDLED_KIND = 'bench.nobody';
const PAUSED_QUEUE = 'bench-paused';
const ON_JOB = Symbol('what the handler calls');
const YEAR_MS = 365 * 24 * 3_600_000;

@JobHandler(KIND)
class BenchJob implements Handler<Payload, void> {
  constructor(@Inject(ON_JOB) private readonly onJob: OnJob) {}

  handle({ payload }: Job<Payload>): Promise<void> | void {
    return this.onJob(payload.n);
  }
}

@Module({})
class BenchModule {
  static forRoot(options: LeaseOptions, onJob: OnJob): DynamicModule {
    return {
      module: BenchModule,
      imports: [...(options.role === 'producer' ? [] : [ScheduleModule.forRoot()]), LeaseModule.forRoot(options)],
      providers: [BenchJob, { provide: ON_JOB, useValue: onJob }],
    };
  }
}

function createContext(options: LeaseOptions, onJob: OnJob = () => undefined): Promise<INestApplicationContext> {
  return NestFactory.createApplicationContext(BenchModule.forRoot(options, onJob), {
    logger: ['error', 'fatal'],
    abortOnError: false,
  });
}

const about: About = {
  title: 'Leasehold',
  package: '@leasehold/nestjs',
  settings: [
    'LeaseModule in a Nest application context, a handler class, default options except concurrency (100 for the module and for the kind; 200 for work5)',
  ],
  contract: [
    'Every job has a lease of its own with a fencing token; history is kept: nothing is deleted when a job ends.',
    'enqueue() calls that overlap share a statement.',
  ],
};

/** Jobs that can run or do: those that are due, of our kind, outside the paused queue; and batches that have not ended. */
const REMAINING = `
  SELECT (SELECT count(*) FROM leasehold.ready WHERE kind = '${KIND}' AND queue <> '${PAUSED_QUEUE}')::int
    + (SELECT count(*) FROM leasehold.leases)::int
    + (SELECT count(*) FROM leasehold.batches WHERE status = 'running')::int AS count`;

let client: Promise<Client> | undefined;

async function connect(url: string): Promise<Client> {
  const connection = new Client({ connectionString: url });
  await connection.connect();
  return connection;
}

async function openProducer(url: string): Promise<Producer> {
  const app = await createContext({ role: 'producer', connection: { url } });
  const jobs = app.get(JobsService);
  const batches = app.get(BatchesService);
  const pause = async (): Promise<unknown> =>
    // There is no pause in the API yet.
    (await (client ??= connect(url))).query(
      `INSERT INTO leasehold.queues (name, paused) VALUES ('${PAUSED_QUEUE}', true) ON CONFLICT DO NOTHING`,
    );
  const head: Record<HeadKind, (payloads: Payload[]) => Promise<unknown>> = {
    unhandled: (payloads) => jobs.enqueueMany(UNHANDLED_KIND, payloads),
    paused: async (payloads) => {
      await pause();
      await jobs.enqueueMany(BenchJob, payloads, { queue: PAUSED_QUEUE });
    },
    future: (payloads) => jobs.enqueueMany(BenchJob, payloads, { runAt: new Date(Date.now() + YEAR_MS) }),
  };
  return {
    one: (payload) => jobs.enqueue(BenchJob, payload),
    bulk: (payloads) => jobs.enqueueMany(BenchJob, payloads),
    asBatch: (payloads) =>
      batches.create(
        'bench',
        payloads.map((payload) => ({ handler: BenchJob, payload })),
      ),
    head: (kind, payloads) => head[kind](payloads),
    close: () => app.close(),
  };
}

export const adapter: Adapter = {
  about,
  setup: async (url) => (await createContext({ role: 'producer', connection: { url }, migrate: true })).close(),
  producer: (url) => openProducer(url),
  worker: async (url, { concurrency }, onJob) => {
    const app = await createContext(
      { role: 'worker', connection: { url }, concurrency, handlers: { [KIND]: { concurrency } } },
      onJob,
    );
    return { stop: () => app.close() };
  },
  remaining: async (url) => {
    const { rows } = await (await (client ??= connect(url))).query<{ count: number }>(REMAINING);
    return rows[0]?.count ?? 0;
  },
};
