import { Injectable } from '@nestjs/common';
import { IsDefined, IsInt, IsString, Length, ValidateNested } from 'class-validator';
import { Type as TypeOf } from 'class-transformer';
import { Pool } from 'pg';
import { DataSource } from 'typeorm';
import {
  type EnqueueOptions,
  type FindJobs,
  type Handler,
  InvalidJobError,
  type Job,
  JobHandler,
  SchemaError,
  UnknownJobError,
} from '@leasehold/nestjs';
import { createTestDatabase, eventually, type TestDatabase } from './support';
import { untilState } from './support/job-states';
import { type LeaseApp, startLeaseApp } from './support/lease-app';

class Address {
  @IsString()
  @Length(2, 2)
  country: string;
}
class InvoiceDto {
  @IsInt()
  no: number;

  @IsDefined()
  @ValidateNested()
  @TypeOf(() => Address)
  to: Address;
}

@Injectable()
@JobHandler('jobs.invoice', { queue: 'billing', priority: 3, maxAttempts: 4, deadline: '7m', payload: InvoiceDto })
class Invoice implements Handler<InvoiceDto, string> {
  handle({ payload }: Job<InvoiceDto>): string {
    return `${payload.constructor.name} ${payload.no} to ${payload.to.constructor.name} ${payload.to.country}`;
  }
}

const GOOD: InvoiceDto = { no: 1, to: { country: 'IS' } };

let db: TestDatabase;
let app: LeaseApp;

beforeAll(async () => {
  db = await createTestDatabase();
});
beforeEach(async () => {
  app = await startLeaseApp(db, { handlers: [Invoice], options: { role: 'producer' } });
});
afterAll(() => db.drop());

const countJobs = async () => (await db.one<{ n: number }>('SELECT count(*)::int AS n FROM leasehold.jobs')).n;

/** Asserts that it is refused with this field, and nothing written. */
async function refused(work: () => Promise<unknown>, field: string, message?: RegExp): Promise<void> {
  const before = await countJobs();
  const error = await work().then(
    () => undefined,
    (thrown: unknown) => thrown,
  );
  expect(error).toBeInstanceOf(InvalidJobError);
  expect(error).toMatchObject({ code: 'INVALID_JOB', field });
  if (message) expect((error as Error).message).toMatch(message);
  expect(await countJobs()).toBe(before);
}

describe('enqueue', () => {
  it('by class, typed, with the defaults of its kind; and by name', async () => {
    const byClass = await app.jobs.get<typeof Invoice>(await app.jobs.enqueue(Invoice, GOOD));
    expect(byClass.payload.to.country).toBe('IS');
    const byName = await app.jobs.get(await app.jobs.enqueue('jobs.invoice', GOOD));
    for (const job of [byClass, byName]) {
      expect(job).toMatchObject({
        kind: 'jobs.invoice',
        queue: 'billing',
        priority: 3,
        maxAttempts: 4,
        maxCrashes: 3,
        payload: GOOD,
        state: 'ready',
        attempt: 0,
        tags: [],
        runs: [],
      });
    }
    // @ts-expect-error the payload's type comes from the class
    await refused(() => app.jobs.enqueue(Invoice, { no: 1 }), 'payload.to');
    // @ts-expect-error a class that is no handler
    await refused(() => app.jobs.enqueue(Address, {}), 'handler', /Address is no class decorated with @JobHandler/);
  });

  it("a kind that only other processes handle takes the module's defaults", async () => {
    const job = await app.jobs.get(await app.jobs.enqueue('jobs.elsewhere', undefined));
    expect(job).toMatchObject({ queue: 'default', priority: 0, maxAttempts: 20, payload: null, state: 'ready' });
  });

  it('every option', async () => {
    const runAt = new Date(Date.now() + 3_600_000);
    const id = await app.jobs.enqueue(Invoice, GOOD, {
      runAt,
      priority: -32_768,
      queue: 'urgent',
      maxAttempts: 1,
      maxCrashes: 1,
      deadline: '90s',
      tags: ['a', 'ü'],
    });
    expect(await app.jobs.get(id)).toMatchObject({
      state: 'scheduled',
      runAt,
      priority: -32_768,
      queue: 'urgent',
      maxAttempts: 1,
      maxCrashes: 1,
      suspect: true,
      tags: ['a', 'ü'],
    });
    const deadline = await db.one('SELECT deadline_ms FROM leasehold.jobs WHERE id = $1', [id]);
    expect(deadline).toEqual({ deadline_ms: '90000' });
  });

  it.each<[string, EnqueueOptions, number | null]>([
    ['its own', { deadline: 1500 }, 1500],
    ["'off'", { deadline: 'off' }, null],
    ["its kind's", {}, 420_000],
  ])('the deadline: %s', async (_, options, ms) => {
    const id = await app.jobs.enqueue(Invoice, GOOD, options);
    const row = await db.one('SELECT deadline_ms::int AS ms FROM leasehold.jobs WHERE id = $1', [id]);
    expect(row).toEqual({ ms });
  });

  it.each<[string, EnqueueOptions]>([
    ['a Date', { runAt: new Date('2100-01-31T08:00:00Z') }],
    ['UTC text', { runAt: '2100-01-31T08:00:00Z' }],
    ['text with an offset', { runAt: '2100-01-31T13:30:00+05:30' }],
  ])('R26 runAt as %s is the same moment', async (_, options) => {
    const { runAt, state } = await app.jobs.get(await app.jobs.enqueue('jobs.later', 1, options));
    expect([state, runAt?.toISOString()]).toEqual(['scheduled', '2100-01-31T08:00:00.000Z']);
  });

  it('R26 a moment that has passed, and no delay, mean ready at once', async () => {
    for (const options of [{ runAt: '1999-12-31T23:59:59Z' }, { delay: 0 }] satisfies EnqueueOptions[]) {
      expect(await app.jobs.get(await app.jobs.enqueue('jobs.later', 1, options))).toMatchObject({
        state: 'ready',
        runAt: null,
      });
    }
  });

  const wrong: [field: string, value: unknown][] = [
    ['runAt', '2030-01-31T08:00:00'],
    ['runAt', '2030-01-31'],
    ['runAt', 'tomorrow'],
    ['runAt', new Date(NaN)],
    ['runAt', '+275000-01-31T08:00:00Z'],
    ['delay', -1],
    ['delay', NaN],
    ['delay', '5 parsecs'],
    ['delay', '9999999d'],
    ['priority', 32_768],
    ['priority', -32_769],
    ['priority', 0.5],
    ['priority', '1'],
    ['maxAttempts', 0],
    ['maxAttempts', 2_147_483_648],
    ['maxCrashes', 0],
    ['deadline', 0],
    ['deadline', 'never'],
    ['queue', ''],
    ['queue', 'a\0b'],
    ['queue', '\ud800'],
    ['tags', 'a'],
    ['tags', ['']],
    ['tags', [1]],
    ['tags', ['\0']],
    ['tags', ['a\udfff']],
    ['prioritiy', 1],
  ];
  it.each(wrong)('F:E1 %s = %j is refused by name, and nothing is written', async (field, value) => {
    await refused(() => app.jobs.enqueue('jobs.wrong', 1, { [field]: value }), field, new RegExp(field));
  });

  it('F:E9 names and lists that are too long are refused, in bytes', async () => {
    await refused(() => app.jobs.enqueue('jobs.wrong', 1, { queue: 'q'.repeat(7000) }), 'queue');
    await refused(() => app.jobs.enqueue('jobs.wrong', 1, { queue: 'ü'.repeat(101) }), 'queue');
    await refused(() => app.jobs.enqueue('jobs.wrong', 1, { tags: ['x'.repeat(101)] }), 'tags');
    await refused(() => app.jobs.enqueue('jobs.wrong', 1, { tags: Array<string>(21).fill('x') }), 'tags');
    await refused(() => app.jobs.enqueue('k'.repeat(201), 1), 'kind');
    await app.jobs.enqueue('k'.repeat(200), 1, {
      queue: 'ü'.repeat(100),
      tags: Array<string>(20).fill('x'.repeat(100)),
    });
  });

  it('runAt and delay together are refused, and a misspelt option gets a suggestion', async () => {
    await refused(() => app.jobs.enqueue('jobs.wrong', 1, { runAt: new Date(), delay: 1 }), 'delay');
    const options = { prioritiy: 1 } as EnqueueOptions;
    await refused(() => app.jobs.enqueue('jobs.wrong', 1, options), 'prioritiy', /did you mean 'priority'/);
  });

  const cyclic: Record<string, unknown> = {};
  cyclic.self = cyclic;
  const unstorable: [string, unknown][] = [
    ['a NUL', { text: 'a\0b' }],
    ['a NUL in a key', { 'a\0': 1 }],
    ['a lone surrogate', ['\ud800x']],
    ['a cycle', cyclic],
    ['a BigInt', { n: 1n }],
    ['a function', () => undefined],
  ];
  it.each(unstorable)('F:E1 a payload with %s is refused as field payload', async (_, payload) => {
    await refused(() => app.jobs.enqueue('jobs.wrong', payload), 'payload');
    await refused(() => app.jobs.enqueue('jobs.invoice', payload), 'payload');
  });

  it.each([['jobs.\0'], ['\ud800'], ['']])('F:E1 the kind %j is refused as field kind', async (kind) => {
    await refused(() => app.jobs.enqueue(kind, 1), 'kind');
  });

  it('text that only looks like an escaped NUL is stored as it is', async () => {
    const payload = { text: '\\u0000 \\\\u0000 \\ud800', pair: '😀' };
    expect((await app.jobs.get(await app.jobs.enqueue('jobs.text', payload))).payload).toEqual(payload);
  });

  it('the DTO is checked: every broken field is in the message, the first in `field`', async () => {
    const payload = { no: 'x', to: { country: 'ISL' } } as unknown as InvoiceDto;
    await refused(
      () => app.jobs.enqueue(Invoice, payload),
      'payload.no',
      /payload\.no: no must be an integer.*payload\.to\.country: country must be/,
    );
    for (const none of [null, undefined, 'text', []])
      await refused(() => app.jobs.enqueue('jobs.invoice', none), 'payload');
  });
});

describe('the DTO at the handler', () => {
  it('gets an instance; a row that was altered meanwhile fails at once, with InvalidJobError and no retry', async () => {
    const [good, altered] = await app.jobs.enqueueMany(Invoice, [GOOD, GOOD]);
    await db.query(`UPDATE leasehold.jobs SET payload = '{"no": "x"}' WHERE id = $1`, [altered]);
    const { jobs } = await startLeaseApp(db, { handlers: [Invoice] });
    expect((await untilState(jobs, good ?? '', 'completed')).result).toBe('InvoiceDto 1 to Address IS');
    const failed = await untilState(jobs, altered ?? '', 'failed');
    expect(failed).toMatchObject({ attempt: 1, maxAttempts: 4, runs: [], error: { name: 'InvalidJobError' } });
    expect(failed.reason).toMatch(/payload\.no: no must be an integer/);
  });
});

describe('in a transaction of the caller', () => {
  let source: DataSource;
  let pool: Pool;
  beforeAll(async () => {
    source = await new DataSource({ type: 'postgres', url: db.url, installExtensions: false }).initialize();
    pool = new Pool({ connectionString: db.url });
  });
  afterAll(async () => {
    await source.destroy();
    await pool.end();
  });
  const there = async (id: string) => (await db.query('SELECT FROM leasehold.jobs WHERE id = $1', [id])).length === 1;

  it('manager: visible at commit, gone at rollback', async () => {
    const id = await source.transaction(async (manager) => {
      const inside = await app.jobs.enqueue(Invoice, GOOD, { manager });
      expect(await there(inside)).toBe(false);
      return inside;
    });
    expect(await there(id)).toBe(true);

    let lost: string[] = [];
    const failing = source.transaction(async (manager) => {
      lost = await app.jobs.enqueueMany([{ handler: Invoice, payload: GOOD }], { manager });
      lost.push(...(await app.jobs.enqueueMany(Invoice, [GOOD], { manager })));
      throw new Error('changed my mind');
    });
    await expect(failing).rejects.toThrow('changed my mind');
    expect(lost).toHaveLength(2);
    for (const gone of lost) expect(await there(gone)).toBe(false);
  });

  it('queryRunner: visible at commit, gone at rollback', async () => {
    const queryRunner = source.createQueryRunner();
    try {
      for (const end of ['commit', 'rollback'] as const) {
        await queryRunner.startTransaction();
        const id = await app.jobs.enqueue(Invoice, GOOD, { queryRunner });
        expect(await there(id)).toBe(false);
        await (end === 'commit' ? queryRunner.commitTransaction() : queryRunner.rollbackTransaction());
        expect(await there(id)).toBe(end === 'commit');
      }
      await refused(() => app.jobs.enqueue(Invoice, GOOD, { queryRunner }), 'queryRunner', /no open transaction/);
    } finally {
      await queryRunner.release();
    }
  });

  it('pg client: visible at commit, gone at rollback', async () => {
    const client = await pool.connect();
    try {
      for (const end of ['COMMIT', 'ROLLBACK']) {
        await client.query('BEGIN');
        const id = await app.jobs.enqueue(Invoice, GOOD, { client });
        expect(await there(id)).toBe(false);
        await client.query(end);
        expect(await there(id)).toBe(end === 'COMMIT');
      }
      await refused(() => app.jobs.enqueue(Invoice, GOOD, { client }), 'client', /no open transaction/);
    } finally {
      client.release();
    }
  });

  it('a worker hears of it at the commit', async () => {
    const worker = await startLeaseApp(db, { handlers: [Invoice], options: { poll: '1h' } });
    await eventually(() => worker.leader.isLeader, { what: 'Having the connection that listens' });
    const id = await source.transaction((manager) => app.jobs.enqueue(Invoice, GOOD, { manager }));
    await untilState(worker.jobs, id, 'completed');
  });

  it('what cannot be one transaction is refused: no transaction open, a pool, two at once, one per item', async () => {
    const { manager } = source;
    await refused(() => app.jobs.enqueue(Invoice, GOOD, { manager }), 'manager', /dataSource\.transaction/);
    await refused(() => app.jobs.enqueue(Invoice, GOOD, { client: pool as never }), 'client', /is a pool/);
    await source.transaction(async (inside) => {
      const both = { manager: inside, queryRunner: inside.queryRunner } as EnqueueOptions;
      await refused(() => app.jobs.enqueue(Invoice, GOOD, both), 'manager');
      const item = { handler: Invoice, payload: GOOD, manager: inside };
      await refused(() => app.jobs.enqueueMany([item]), '[0].manager', /second argument/);
      await refused(() => app.jobs.enqueueMany([], { delay: 1 } as never), 'delay', /only in each item/);
    });
  });

  it('a database without our schema is a SchemaError', async () => {
    const elsewhere = await createTestDatabase({ name: 'jobs_elsewhere' });
    const client = await elsewhere.client();
    await client.query('BEGIN');
    await expect(app.jobs.enqueue(Invoice, GOOD, { client })).rejects.toThrow(SchemaError);
    await elsewhere.drop();
  });
});

describe('looking', () => {
  it('get: unknown and malformed ids', async () => {
    await expect(app.jobs.get('999999999999')).rejects.toThrow(UnknownJobError);
    for (const id of ['', 'x', '1.5', '-1', '9223372036854775808', 7 as never]) {
      await refused(() => app.jobs.get(id), 'id', /is no job id/);
    }
  });

  it('find by each filter', async () => {
    const kind = 'jobs.filtered';
    const [ready, tagged, queued] = [
      await app.jobs.enqueue(kind, 1),
      await app.jobs.enqueue(kind, 2, { tags: ['red', 'big'] }),
      await app.jobs.enqueue(kind, 3, { queue: 'other', delay: '1h' }),
    ];
    const found = async (filter: FindJobs) => (await app.jobs.find({ kind, ...filter })).jobs.map(({ id }) => id);
    expect(await found({})).toEqual([queued, tagged, ready]);
    expect(await found({ tag: 'red' })).toEqual([tagged]);
    expect(await found({ queue: 'other' })).toEqual([queued]);
    expect(await found({ state: 'scheduled' })).toEqual([queued]);
    expect(await found({ state: 'ready' })).toEqual([tagged, ready]);
    for (const state of ['blocked', 'paused', 'running', 'completed', 'failed', 'cancelled'] as const) {
      expect(await found({ state })).toEqual([]);
    }
    expect(await found({ kind: 'jobs.none' })).toEqual([]);
    await refused(() => app.jobs.find({ state: 'redy' as never }), 'state', /did you mean 'ready'/);
    await refused(() => app.jobs.find({ limit: 0 }), 'limit');
    await refused(() => app.jobs.find({ limit: 1001 }), 'limit');
    await refused(() => app.jobs.find({ after: 'x' }), 'after');
  });

  it('find in pages: each job once, newest first, while others are added', async () => {
    const kind = 'jobs.paged';
    const ids = await app.jobs.enqueueMany(
      kind,
      Array.from({ length: 30 }, (_, i) => i),
    );
    const seen: string[] = [];
    for (let after: string | undefined; ;) {
      const page = await app.jobs.find({ kind, limit: 7, ...(after === undefined ? {} : { after }) });
      seen.push(...page.jobs.map(({ id }) => id));
      await app.jobs.enqueueMany(kind, [1, 2, 3]);
      if (page.next === null) break;
      after = page.next;
    }
    expect(seen).toEqual([...ids].reverse());
  });

  it('counts every state, from rows', async () => {
    const { jobs } = await startLeaseApp(db, { options: { role: 'producer', schema: 'counted' } });
    await jobs.enqueueMany('jobs.counted', [1, 2, 3]);
    await jobs.enqueue('jobs.counted', 4, { delay: '1h' });
    const none = { blocked: 0, paused: 0, running: 0, completed: 0, failed: 0, cancelled: 0 };
    expect(await jobs.counts()).toEqual({ ...none, ready: 3, scheduled: 1 });
    await db.query(`UPDATE counted.waiting SET reason = 'paused'`);
    expect(await jobs.counts()).toEqual({ ...none, ready: 3, scheduled: 0, paused: 1 });
  });
});
