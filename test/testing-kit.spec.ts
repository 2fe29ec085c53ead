import {
  type Handler,
  type Job,
  JobHandler,
  JobsService,
  type JobStatus,
  type Lease,
  SnoozeError,
} from '@leasehold/nestjs';
import {
  DrainLimitError,
  ExpectationError,
  JobNotRunningError,
  JobsFailedError,
  LeaseTesting,
  LeaseTestingModule,
  type LeaseTestingOptions,
} from '@leasehold/nestjs/testing';
import { type INestApplicationContext, Injectable, Logger, type Provider } from '@nestjs/common';
import { Test } from '@nestjs/testing';
import { IsEmail, IsInt } from 'class-validator';
import { type TestDatabase, createTestDatabase, eventually, gate } from './support';

class MailDto {
  @IsEmail()
  to: string;

  @IsInt()
  copies: number;
}

/** What handlers do is for the test to say. */
@Injectable()
class Script {
  readonly ran: string[] = [];
  readonly failedForGood: string[] = [];
  work: (payload: never, lease: Lease) => unknown = () => undefined;

  do(kind: string, payload: unknown, lease: Lease): unknown {
    this.ran.push(kind);
    return this.work(payload as never, lease);
  }
}

@JobHandler('mail.send', { queue: 'mail', payload: MailDto, backoff: '1m', maxAttempts: 2 })
class SendMail implements Handler<MailDto, { sent: number }> {
  constructor(private readonly script: Script) {}
  async handle({ payload }: Job<MailDto>, lease: Lease): Promise<{ sent: number }> {
    await this.script.do('mail.send', payload, lease);
    return { sent: payload.copies };
  }
  async onFailed({ id }: JobStatus<MailDto>): Promise<void> {
    await new Promise((resolve) => setTimeout(resolve, 30));
    this.script.failedForGood.push(id);
  }
}

@JobHandler('tick')
class Tick implements Handler<number> {
  constructor(
    private readonly script: Script,
    private readonly jobs: JobsService,
  ) {}
  async handle({ payload }: Job<number>, lease: Lease): Promise<void> {
    await this.script.do(`tick ${payload}`, payload, lease);
    if (payload > 0) await this.jobs.enqueue(Tick, payload - 1);
  }
}

let db: TestDatabase;
const apps: INestApplicationContext[] = [];

beforeAll(async () => {
  Logger.overrideLogger(false);
  db = await createTestDatabase();
});
afterEach(async () => {
  for (const app of apps.splice(0)) await app.close();
  await db.query('DROP SCHEMA IF EXISTS leasehold, leasehold_clock CASCADE');
});
afterAll(() => db.drop());

interface Started {
  app: INestApplicationContext;
  lease: LeaseTesting;
  jobs: JobsService;
  script: Script;
}

async function start(
  options: Partial<LeaseTestingOptions> = {},
  handlers: Provider[] = [SendMail, Tick],
): Promise<Started> {
  const app = await Test.createTestingModule({
    imports: [LeaseTestingModule.forRoot({ connection: { url: db.url }, ...options })],
    providers: [Script, ...handlers],
  }).compile();
  apps.push(app);
  await app.init();
  return { app, lease: app.get(LeaseTesting), jobs: app.get(JobsService), script: app.get(Script) };
}

const mail = (copies = 1): MailDto => ({ to: 'reader@example.org', copies });

describe('runNext', () => {
  it('runs the job that a worker would run next, and says what became of it', async () => {
    const { lease, jobs, script } = await start();
    expect(await lease.runNext()).toBeUndefined();
    await jobs.enqueue(Tick, 0, { priority: 5 });
    const id = await jobs.enqueue(SendMail, mail(2));
    expect(script.ran).toEqual([]);

    const run = await lease.runNext({ kind: SendMail });
    expect(run).toMatchObject({
      outcome: 'completed',
      job: { id, state: 'completed', attempt: 1, result: { sent: 2 } },
    });
    expect(run?.job.payload.copies).toBe(2);
    expect(run?.error).toBeUndefined();
    expect(await lease.runNext({ queue: 'mail' })).toBeUndefined();
    expect((await lease.runNext())?.job.kind).toBe('tick');
    await expect(lease.runNext({ kind: 'mail.sent' })).rejects.toThrow(
      /no handler of this kind.*did you mean 'mail.send'/,
    );
  });

  it('checks the payload again, and takes due scheduled jobs by priority', async () => {
    const { lease, jobs, script } = await start();
    await jobs.enqueue(Tick, 0, { delay: '1ms', priority: 3 });
    await jobs.enqueue(SendMail, mail(), { delay: '2ms', priority: 1 });
    await db.query(`UPDATE leasehold.jobs SET payload = '{"to":"nobody","copies":1}' WHERE kind = 'mail.send'`);
    await new Promise((resolve) => setTimeout(resolve, 20));
    expect(await lease.runNext()).toMatchObject({
      outcome: 'failed',
      error: { message: expect.stringContaining('payload.to: to must be an email') },
      job: { kind: 'mail.send', state: 'failed' },
    });
    expect(await lease.runNext()).toMatchObject({ job: { kind: 'tick' } });
    expect(script.ran).toEqual(['tick 0']);
    // onFailed has ended by the time that the run is reported.
    expect(script.failedForGood).toHaveLength(1);
  });

  it('a failure, a snooze, a checkpoint and a lease that trusts itself', async () => {
    const { lease, jobs, script } = await start();
    const id = await jobs.enqueue(SendMail, mail());
    script.work = async (_payload, held) => {
      held.assertHeld();
      held.progress(1, 2);
      await held.checkpoint({ page: 1 });
      throw new SnoozeError(0);
    };
    expect(await lease.runNext()).toMatchObject({ outcome: 'snoozed', job: { id, state: 'scheduled', attempt: 0 } });
    script.work = () => {
      throw new TypeError('no such field');
    };
    expect(await lease.runNext()).toMatchObject({
      outcome: 'failed',
      error: { name: 'TypeError', message: 'no such field', stack: expect.stringContaining('testing-kit.spec') },
      job: { state: 'scheduled', attempt: 1, saved: { checkpoint: { page: 1 }, progress: { current: 1, total: 2 } } },
    });
  });

  it('a command reaches the handler that runs: cancel at once, and all that beat() finds', async () => {
    const { lease, jobs, script } = await start();
    const started = gate();
    script.work = (_payload, { signal }) => {
      started.open();
      return new Promise((_, reject) => signal.addEventListener('abort', () => reject(signal.reason as Error)));
    };
    const id = await jobs.enqueue(SendMail, mail());
    const run = lease.runNext();
    await started.promise;
    expect(await jobs.cancel(id, { reason: 'closed' })).toMatchObject({ requested: true });
    expect(await run).toMatchObject({ outcome: 'cancelled', job: { state: 'cancelled', reason: 'closed' } });

    const second = gate();
    script.work = (_payload, { signal }) => {
      second.open();
      return new Promise((_, reject) => signal.addEventListener('abort', () => reject(signal.reason as Error)));
    };
    const other = await jobs.enqueue(SendMail, mail());
    const paused = lease.runNext();
    await second.promise;
    await db.query('UPDATE leasehold.leases SET pause_requested = true WHERE job_id = $1', [other]);
    expect((await lease.beat()).stops).toEqual([[other, expect.any(String), 'pause']]);
    expect(await paused).toMatchObject({ outcome: 'paused', job: { id: other, state: 'paused', attempt: 0 } });
  });
});

describe('drain', () => {
  it('runs until nothing is due, also what handlers enqueue; of one queue, or of all', async () => {
    const { lease, jobs, script } = await start();
    await jobs.enqueue(Tick, 2);
    await jobs.enqueue(SendMail, mail());
    expect((await lease.drain('mail')).map(({ job }) => job.kind)).toEqual(['mail.send']);
    expect((await lease.drain()).map(({ job, outcome }) => [job.payload, outcome])).toEqual([
      [2, 'completed'],
      [1, 'completed'],
      [0, 'completed'],
    ]);
    expect(script.ran).toEqual(['mail.send', 'tick 2', 'tick 1', 'tick 0']);
    expect(await lease.drain()).toEqual([]);
  });

  it('throws what a handler threw when everything has run, unless told not to', async () => {
    const { lease, jobs, script } = await start();
    script.work = (payload: unknown) => {
      if (typeof payload === 'object') throw new RangeError('too many copies');
    };
    const id = await jobs.enqueue(SendMail, mail());
    await jobs.enqueue(Tick, 0);
    const error = await lease.drain().catch((e: unknown) => e as JobsFailedError);
    expect(error).toBeInstanceOf(JobsFailedError);
    expect((error as Error).message).toMatch(`1 job failed in the drain`);
    expect((error as Error).message).toMatch(`${id} (mail.send), now scheduled: RangeError: too many copies`);
    expect((error as Error).cause).toMatchObject({
      name: 'RangeError',
      stack: expect.stringContaining('testing-kit.spec'),
    });
    expect(script.ran).toEqual(['mail.send', 'tick 0']);

    await lease.advance('1m');
    expect(await lease.drain({ throwOnFailure: false })).toMatchObject([
      { outcome: 'failed', job: { state: 'failed' } },
    ]);
    expect(script.failedForGood).toEqual([id]);
  });

  it('ends with an error that names what keeps coming', async () => {
    const { lease, jobs } = await start();
    await jobs.enqueue(Tick, 1_000_000);
    const error = await lease.drain({ maxRuns: 5 }).catch((e: unknown) => e as DrainLimitError);
    expect(error).toBeInstanceOf(DrainLimitError);
    expect((error as DrainLimitError).runs).toHaveLength(5);
    expect((error as Error).message).toMatch(
      /has run 5 jobs and more are due[\s\S]*tick: 5 runs, 5 jobs, the last are \d+, \d+, \d+/,
    );
    // Exactly as many as there are is no error.
    await lease.clear();
    await jobs.enqueue(Tick, 4);
    expect(await lease.drain({ maxRuns: 5 })).toHaveLength(5);
  });

  it('runs a suspect, and a job under a limit of its kind, as a worker does', async () => {
    const { lease, jobs } = await start({ handlers: { tick: { maxCrashes: 1, fleetConcurrency: 1 } } });
    await jobs.enqueueMany(Tick, [0, 0]);
    expect(await lease.drain()).toHaveLength(2);
  });
});

describe('loseLease', () => {
  it('what a zombie writes is refused, and its job runs again', async () => {
    const { lease, jobs, script } = await start();
    const [started, go] = [gate(), gate()];
    const late: unknown[] = [];
    script.work = async (_payload, held) => {
      if (started.isOpen) return;
      started.open();
      await go.promise;
      await held.checkpoint({ from: 'the zombie' }).catch((e: unknown) => late.push(e));
    };
    const id = await jobs.enqueue(SendMail, mail());
    const zombie = lease.runNext();
    await started.promise;
    expect(await lease.loseLease(id)).toMatchObject({ state: 'ready', attempt: 0, crashes: 1 });
    await expect(lease.loseLease(id)).rejects.toThrow(JobNotRunningError);
    expect(await lease.drain()).toMatchObject([{ outcome: 'completed', job: { id, result: { sent: 1 } } }]);

    go.open();
    expect(await zombie).toMatchObject({ outcome: 'refused', job: { id, state: 'completed', saved: null } });
    expect(late).toMatchObject([{ code: 'LEASE_LOST', jobId: id }]);
    await expect(lease.loseLease(id)).rejects.toThrow(`Job ${id} is completed and not run by this kit`);
  });

  it('a job out of crashes fails for good; beat() tells the handler', async () => {
    const { lease, jobs, script } = await start({ maxCrashes: 1 });
    const started = gate();
    script.work = (_payload, { signal }) => {
      started.open();
      return new Promise((resolve) => signal.addEventListener('abort', () => resolve(undefined)));
    };
    const id = await jobs.enqueue(SendMail, mail());
    const zombie = lease.runNext();
    // Without waiting for the handler: the claim on its way is waited for.
    expect(await lease.loseLease({ id })).toMatchObject({ state: 'failed', outcome: 'dead' });
    expect(script.failedForGood).toEqual([id]);
    await started.promise;
    expect((await lease.beat()).gone).toEqual([[id, expect.any(String)]]);
    expect((await zombie)?.outcome).toBe('refused');
  });
});

it('several jobs run side by side, as one worker', async () => {
  const { lease, jobs, script } = await start();
  const go = gate();
  script.work = () => go.promise;
  const ids = await jobs.enqueueMany(SendMail, [mail(), mail()]);
  const runs = [lease.runNext(), lease.runNext()];
  await eventually(() => script.ran.length === 2);
  expect(await db.query('SELECT DISTINCT worker_id FROM leasehold.leases')).toHaveLength(1);
  for (const id of ids) expect(await lease.loseLease(id)).toMatchObject({ state: 'ready', crashes: 1 });
  expect((await lease.beat()).gone).toHaveLength(2);
  go.open();
  expect((await Promise.all(runs)).map((run) => run?.outcome)).toEqual(['refused', 'refused']);
});

describe('expectEnqueued', () => {
  it('compares payloads in part, by matchers, and by functions', async () => {
    const { lease, jobs } = await start();
    const id = await jobs.enqueue(SendMail, mail(3));
    await jobs.enqueue('report.build', { month: '2026-01', pages: [{ n: 1, title: 'Sales' }], due: new Date(0) });
    expect((await lease.expectEnqueued(SendMail)).id).toBe(id);
    expect((await lease.expectEnqueued(SendMail, { copies: 3 }, { queue: 'mail' })).payload.to).toBe(mail().to);
    await lease.expectEnqueued(SendMail, { to: expect.stringContaining('@'), copies: expect.any(Number) });
    await lease.expectEnqueued(SendMail, expect.objectContaining({ copies: 3 }));
    await lease.expectEnqueued(SendMail, { to: /example\.org$/ });
    await lease.expectEnqueued(SendMail, ({ copies }, job) => copies === 3 && job.state === 'ready');
    await lease.expectEnqueued('report.build', { pages: [{ title: 'Sales' }], due: new Date(0) }, { count: 1 });
    // @ts-expect-error The payload's type is the handler's.
    await lease.expectNotEnqueued(SendMail, { copies: 'three' });
    await lease.drain();
    // Whatever has become of it.
    expect((await lease.expectEnqueued(SendMail)).state).toBe('completed');
    await lease.expectNotEnqueued(SendMail, { copies: 4 });
    await lease.expectNotEnqueued(Tick);
    await lease.expectNotEnqueued(SendMail, undefined, { queue: 'default' });
  });

  it('a failure lists what was enqueued instead', async () => {
    const { lease, jobs } = await start();
    const id = await jobs.enqueue(SendMail, mail(3));
    await jobs.enqueue(Tick, 0);
    const said = async (work: Promise<unknown>): Promise<string> => {
      const error = await work.then(
        () => new Error('nothing'),
        (e: Error) => e,
      );
      expect(error).toBeInstanceOf(ExpectationError);
      return error.message;
    };
    expect(await said(lease.expectEnqueued(SendMail, { to: expect.any(Number), copies: 4 }))).toBe(
      [
        `No job 'mail.send' with a payload like { to: Any<Number>, copies: 4 } was enqueued`,
        `Of kind 'mail.send' there are 1:`,
        `  ${id} ready in 'mail': { to: 'reader@example.org', copies: 3 } - payload.to is 'reader@example.org', not Any<Number>; payload.copies is 3, not 4`,
        `Other kinds: tick (1)`,
      ].join('\n'),
    );
    expect(await said(lease.expectEnqueued(SendMail, undefined, { count: 2 }))).toMatch(
      /^Not 2, but 1: job 'mail.send'[\s\S]*- fits/,
    );
    expect(await said(lease.expectEnqueued('mail.sent'))).toMatch(`nothing was enqueued; did you mean 'mail.send'?`);
    expect(await said(lease.expectNotEnqueued(SendMail))).toBe(
      `A job 'mail.send' was enqueued:\n  ${id} ready in 'mail': { to: 'reader@example.org', copies: 3 }`,
    );
    expect(await said(lease.expectEnqueued(SendMail, undefined, { queue: 'x' }))).toMatch(
      `it is in queue 'mail', not 'x'`,
    );
    await expect(lease.expectEnqueued(Script as never)).rejects.toThrow(
      'Script is no class decorated with @JobHandler',
    );
    await expect(lease.expectEnqueued(SendMail, {}, { count: 0 })).rejects.toThrow('expectNotEnqueued');
    await expect(lease.expectEnqueued(SendMail, {}, { qeue: 'x' } as never)).rejects.toThrow(`did you mean 'queue'`);
  });
});
