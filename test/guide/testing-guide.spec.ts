import { type Handler, type Job, JobHandler, JobsService, type Lease, LeaseModule } from '@leasehold/nestjs';
import { LeaseTesting, LeaseTestingModule } from '@leasehold/nestjs/testing';
import { Injectable, Module } from '@nestjs/common';
import { Test, type TestingModule } from '@nestjs/testing';
import { IsEmail, IsUUID } from 'class-validator';
import { randomUUID } from 'node:crypto';
import { DataSource } from 'typeorm';
import { type TestDatabase, createTestDatabase } from '../support';
import { expectPageShowsSpec } from '../support/page-examples';

// What the examples take for granted: the handler and the service of the README.

class SendInvoiceDto {
  @IsUUID()
  invoiceId: string;

  @IsEmail()
  to: string;
}

@Injectable()
class Mailer {
  readonly sent: string[] = [];
  send(to: string, _options: { signal: AbortSignal }): Promise<string> {
    this.sent.push(to);
    return Promise.resolve(`message ${this.sent.length}`);
  }
}

@JobHandler('invoice.send', { queue: 'mail', deadline: '2m', backoff: '1m', maxAttempts: 3, payload: SendInvoiceDto })
class SendInvoice implements Handler<SendInvoiceDto, { messageId: string }> {
  constructor(private readonly mailer: Mailer) {}

  async handle({ payload }: Job<SendInvoiceDto>, lease: Lease): Promise<{ messageId: string }> {
    const messageId = await this.mailer.send(payload.to, { signal: lease.signal });
    await lease.checkpoint({ messageId });
    return { messageId };
  }
}

@Injectable()
class InvoicesService {
  constructor(private readonly jobs: JobsService) {}

  async create(to: string): Promise<string> {
    const invoiceId = randomUUID();
    await this.jobs.enqueue(SendInvoice, { invoiceId, to });
    await this.jobs.enqueue('invoice.remind', { invoiceId }, { delay: '14d' });
    return invoiceId;
  }
}

@JobHandler('invoice.remind')
class Remind implements Handler<{ invoiceId: string }> {
  constructor(private readonly mailer: Mailer) {}
  async handle(_job: Job, lease: Lease): Promise<void> {
    await this.mailer.send('a reminder', { signal: lease.signal });
  }
}

let db: TestDatabase;
let dataSource: DataSource;
beforeAll(async () => {
  db = await createTestDatabase({ name: 'guide-testing' });
  process.env.TEST_DATABASE_URL = db.url;
  dataSource = await new DataSource({ type: 'postgres', url: db.url, installExtensions: false }).initialize();
});
afterAll(async () => {
  await dataSource.destroy();
  await db.drop();
});

describe('invoices', () => {
  // #region module
  let app: TestingModule;
  let lease: LeaseTesting;

  beforeAll(async () => {
    app = await Test.createTestingModule({
      imports: [LeaseTestingModule.forRoot({ connection: { url: process.env.TEST_DATABASE_URL } })],
      providers: [InvoicesService, SendInvoice, Remind, Mailer],
    }).compile();
    await app.init();
    lease = app.get(LeaseTesting);
  });
  afterEach(() => lease.clear()); // Every job, and all that is known about it.
  afterAll(() => app.close());
  // #endregion

  afterEach(async () => {
    app.get(Mailer).sent.length = 0;
    jest.restoreAllMocks();
    await lease.resetTime();
  });

  // #region first
  it('sends the invoice', async () => {
    await app.get(InvoicesService).create('reader@example.org');
    await lease.expectEnqueued(SendInvoice, { to: 'reader@example.org', invoiceId: expect.any(String) });

    const [run] = await lease.drain('mail');
    expect(run).toMatchObject({ outcome: 'completed', job: { result: { messageId: 'message 1' } } });
    expect(app.get(Mailer).sent).toEqual(['reader@example.org']);
  });
  // #endregion

  it('expects', async () => {
    await app.get(InvoicesService).create('reader@example.org');
    // #region expect
    const job = await lease.expectEnqueued(SendInvoice, ({ to }) => to.endsWith('@example.org'), { queue: 'mail' });
    expect(job.maxAttempts).toBe(3);
    await lease.expectEnqueued('invoice.remind', undefined, { count: 1 });
    await lease.expectNotEnqueued(SendInvoice, { to: /@spam\.example$/ });
    // #endregion
  });

  // #region backoff
  it('tries again after a minute, and reminds after a fortnight', async () => {
    const send = jest.spyOn(app.get(Mailer), 'send').mockRejectedValueOnce(new Error('the mail server is down'));
    await app.get(InvoicesService).create('reader@example.org');

    const failed = await lease.runNext({ kind: SendInvoice });
    expect(failed).toMatchObject({ outcome: 'failed', error: { message: 'the mail server is down' } });
    expect(await lease.drain()).toEqual([]); // Not due yet.

    await lease.advance('1m');
    expect(await lease.drain()).toMatchObject([{ outcome: 'completed', job: { kind: 'invoice.send', attempt: 2 } }]);
    await lease.advance('14d');
    expect(await lease.drain()).toMatchObject([{ outcome: 'completed', job: { kind: 'invoice.remind' } }]);
    expect(send).toHaveBeenCalledTimes(3);
  });
  // #endregion

  // #region deadline
  it('gives up at its deadline', async () => {
    const calling = new Promise<AbortSignal>((resolve) => {
      jest.spyOn(app.get(Mailer), 'send').mockImplementationOnce((_to, { signal }) => {
        resolve(signal);
        return new Promise((_, reject) => signal.addEventListener('abort', () => reject(signal.reason as Error)));
      });
    });
    await app.get(InvoicesService).create('reader@example.org');

    const run = lease.runNext({ kind: SendInvoice }); // Not awaited: the handler is held at the mail server.
    await calling;
    await lease.advance('3m');
    expect(await lease.rescue()).toBe(1); // What the leader does every five seconds.

    expect((await calling).aborted).toBe(true);
    expect(await run).toMatchObject({ outcome: 'refused', job: { state: 'scheduled', attempt: 1 } });
  });
  // #endregion

  // #region zombie
  it('saves nothing when another has taken its job', async () => {
    let job = '';
    jest.spyOn(app.get(Mailer), 'send').mockImplementationOnce(async () => {
      await lease.loseLease(job); // As if this process had been frozen here, and declared dead.
      return 'message of a zombie';
    });
    await app.get(InvoicesService).create('reader@example.org');
    job = (await lease.expectEnqueued(SendInvoice)).id;

    const zombie = await lease.runNext({ kind: SendInvoice });
    expect(zombie).toMatchObject({ outcome: 'refused', job: { state: 'ready', crashes: 1, saved: null } });
    await lease.drain(); // Its successor.
    expect(await app.get(JobsService).get(job)).toMatchObject({ result: { messageId: 'message 1' } });
  });
  // #endregion

  describe('in a transaction', () => {
    // #region transaction
    let rollback: () => Promise<void>;

    beforeEach(async () => {
      const runner = dataSource.createQueryRunner();
      await runner.startTransaction();
      const end = await lease.useTransaction(runner.manager);
      rollback = async () => {
        await end();
        await runner.rollbackTransaction();
        await runner.release();
      };
    });
    afterEach(() => rollback());
    // #endregion

    it('leaves nothing', async () => {
      await app.get(InvoicesService).create('reader@example.org');
      await lease.advance('15d');
      expect(await lease.drain()).toHaveLength(2);
      expect(await db.query('SELECT FROM leasehold.jobs')).toEqual([]);
    });
  });
});

describe('the whole application', () => {
  it('as it is', async () => {
    const before = process.env.LEASE_ROLE;
    process.env.LEASE_ROLE = 'producer';
    @Module({
      imports: [
        LeaseModule.forRootAsync({
          useFactory: () => ({
            connection: { url: process.env.TEST_DATABASE_URL },
            role: process.env.LEASE_ROLE === 'producer' ? 'producer' : 'both',
          }),
        }),
      ],
      providers: [InvoicesService, SendInvoice, Remind, Mailer],
    })
    class AppModule {}

    // #region of
    const app = await Test.createTestingModule({ imports: [AppModule] }).compile();
    await app.init();
    const lease = await LeaseTesting.of(app);
    // #endregion
    await app.get(InvoicesService).create('reader@example.org');
    await lease.drain();
    expect(app.get(Mailer).sent).toEqual(['reader@example.org']);
    await lease.clear();
    await app.close();
    if (before === undefined) delete process.env.LEASE_ROLE;
    else process.env.LEASE_ROLE = before;
  });
});

it('the page shows this', () => expectPageShowsSpec('docs/guide/testing.md', 'test/guide/testing-guide.spec.ts'));
