import {
  ClaimService,
  type Handler,
  HeartbeatService,
  InjectLease,
  type Job,
  JobHandler,
  JobsService,
  type Lease,
  LeaseEvents,
  LeaseLostError,
  LeaseModule,
  MIGRATIONS_TABLE,
  SettleService,
  WorkersService,
  type LeasedJob,
  getLeaseToken,
  jobEntity,
  leaseMigrations,
} from '@leasehold/nestjs';
import { LeaseAdminModule } from '@leasehold/nestjs-admin';
import {
  type CanActivate,
  type ExecutionContext,
  Global,
  type INestApplicationContext,
  Injectable,
  Logger,
  Module,
  type OnApplicationShutdown,
} from '@nestjs/common';
import { NestFactory } from '@nestjs/core';
import { ScheduleModule } from '@nestjs/schedule';
import { IsEmail, IsUUID } from 'class-validator';
import type { Request } from 'express';
import { Column, DataSource, Entity, PrimaryGeneratedColumn } from 'typeorm';
import { RowGate, type TestDatabase, createTestDatabase, eventually, startHandWorker } from './support';
import { untilState } from './support/job-states';
import { expectPageShowsSpec } from './support/page-examples';

// The TypeScript of README.md, libs/lease/README.md and CONTRIBUTING.md is what stands between `#region` and `#endregion` here, so it compiles
// and runs; the last test compares the texts. What the examples take for granted comes first.

@Entity('invoices')
class Invoice {
  @PrimaryGeneratedColumn('uuid')
  id: string;

  @Column()
  to: string;
}

@Injectable()
class Mailer {
  readonly sent: { to: string; idempotencyKey: string }[] = [];

  send({ to }: { to: string }, options: { idempotencyKey: string; signal: AbortSignal }): Promise<string> {
    options.signal.throwIfAborted();
    this.sent.push({ to, idempotencyKey: options.idempotencyKey });
    return Promise.resolve(`message ${this.sent.length}`);
  }
}

@Injectable()
class OperatorGuard implements CanActivate {
  canActivate(context: ExecutionContext): boolean {
    return context.switchToHttp().getRequest<Request>().headers.authorization === 'operator';
  }
}

@Global()
@Module({
  providers: [
    {
      provide: DataSource,
      useFactory: () =>
        new DataSource({
          type: 'postgres',
          url: process.env.DATABASE_URL,
          entities: [Invoice],
          installExtensions: false,
        }).initialize(),
    },
  ],
  exports: [DataSource],
})
class DatabaseModule implements OnApplicationShutdown {
  constructor(private readonly dataSource: DataSource) {}

  async onApplicationShutdown(): Promise<void> {
    await this.dataSource.destroy();
  }
}

const stolen = new Set<string>();

async function buildReport(payload: unknown, signal: AbortSignal): Promise<{ pages: number }> {
  signal.throwIfAborted();
  if (payload === 'broken') throw new Error('no such template');
  if (payload === 'stolen') for (const take of stolen) await db.query(take);
  return { pages: 3 };
}

// #region
export class SendInvoiceDto {
  @IsUUID()
  invoiceId: string;

  @IsEmail()
  to: string;
}

@JobHandler('invoice.send', { queue: 'mail', concurrency: 4, deadline: '2m', maxAttempts: 5, payload: SendInvoiceDto })
export class SendInvoice implements Handler<SendInvoiceDto, { messageId: string }> {
  constructor(private readonly mailer: Mailer) {}

  async handle({ payload }: Job<SendInvoiceDto>, lease: Lease): Promise<{ messageId: string }> {
    lease.assertHeld(); // Throws if this process can no longer be sure that the job is its own.
    const messageId = await this.mailer.send(payload, {
      idempotencyKey: lease.key('mail'), // The same in every run of this job, so that the mail service can drop a second one.
      signal: lease.signal, // Aborts when the lease is lost, the deadline passes or the process drains.
    });
    return { messageId };
  }
}
// #endregion

// #region
@Injectable()
export class InvoicesService {
  constructor(
    private readonly dataSource: DataSource,
    private readonly jobs: JobsService,
  ) {}

  /** After the commit both the invoice and its job are there; after a rollback neither is. */
  create(to: string): Promise<string> {
    return this.dataSource.transaction(async (manager) => {
      const invoice = await manager.save(Invoice, { to });
      return this.jobs.enqueue(SendInvoice, { invoiceId: invoice.id, to }, { manager });
    });
  }
}
// #endregion

// #region
@Injectable()
export class ReportRunner {
  constructor(
    private readonly workers: WorkersService,
    private readonly heartbeat: HeartbeatService,
    private readonly claims: ClaimService,
    private readonly settle: SettleService,
  ) {}

  /** Runs what is ready now, at most ten jobs. */
  async runReady(): Promise<void> {
    const worker = await this.workers.register(['report.build']);
    await this.heartbeat.start(worker, (why) => console.warn(`The leases of ${worker.id} are lost: ${why}`));
    try {
      const claimed = await this.claims.claim({ kinds: ['report.build'], limit: 10 });
      for (const { job, signal } of claimed) await this.run(job, signal);
    } finally {
      await this.heartbeat.stop();
      await this.workers.stopped(worker.id);
      this.workers.leave();
    }
  }

  private async run(job: LeasedJob, signal: AbortSignal): Promise<void> {
    const settled = buildReport(job.payload, signal).then(
      (report) => this.settle.complete(job, report),
      (error: unknown) => this.settle.fail(job, error),
    );
    await settled.catch((error: unknown) => {
      // The job is somebody else's by now: what was done here does not count, and there is nothing to report.
      if (!(error instanceof LeaseLostError)) throw error;
    });
  }
}
// #endregion

let db: TestDatabase;
let reports: TestDatabase;
const apps: INestApplicationContext[] = [];

beforeAll(async () => {
  Logger.overrideLogger(false);
  [db, reports] = await Promise.all([createTestDatabase(), createTestDatabase({ name: 'readme_reports' })]);
  process.env.DATABASE_URL = db.url;
  process.env.REPORTS_URL = reports.url;
  process.env.PORT = '0';
  await db.query('CREATE TABLE invoices (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), "to" text NOT NULL)');
});
afterEach(async () => {
  for (const app of apps.splice(0)) await app.close();
});
afterAll(async () => {
  await Promise.all([db.drop(), reports.drop()]);
});

describe('README.md', () => {
  it('an application: a handler, an enqueue in a transaction, the admin API', async () => {
    // #region
    @Module({
      imports: [
        DatabaseModule,
        ScheduleModule.forRoot(),
        LeaseModule.forRoot({ connection: { url: process.env.DATABASE_URL }, migrate: true }),
        LeaseAdminModule.forRoot({ path: 'ops/jobs', guards: [OperatorGuard] }),
      ],
      providers: [SendInvoice, Mailer, InvoicesService],
    })
    class AppModule {}
    // #endregion

    // #region
    const app = await NestFactory.create(AppModule);
    app.enableShutdownHooks(); // So that SIGTERM drains before it ends the process.
    await app.listen(process.env.PORT ?? 3000);
    // #endregion
    apps.push(app);
    const id = await app.get(InvoicesService).create('reader@example.org');
    await untilState(app.get(JobsService), id, 'completed');

    const jobs = app.get(JobsService);
    const log = jest.spyOn(console, 'log').mockImplementation(() => undefined);
    // #region
    const job = await jobs.get<typeof SendInvoice>(id);
    console.log(job.state, job.result?.messageId, job.attempt, job.runs?.length); // completed message 1 1 0
    // #endregion
    expect(log).toHaveBeenCalledWith('completed', 'message 1', 1, 0);
    log.mockRestore();
    expect(job.payload).toMatchObject({ to: 'reader@example.org' });
    expect(app.get(Mailer).sent).toEqual([
      { to: 'reader@example.org', idempotencyKey: expect.stringMatching(/^[0-9a-f-]{36}$/) },
    ]);
    expect(await db.query('SELECT "to" FROM invoices')).toEqual([{ to: 'reader@example.org' }]);

    const url = `${await app.getUrl()}/ops/jobs`;
    expect((await fetch(`${url}/jobs/${id}`)).status).toBe(403);
    const answer = await fetch(`${url}/jobs/${id}`, { headers: { authorization: 'operator' } });
    expect(await answer.json()).toMatchObject({ id, state: 'completed', kind: 'invoice.send', queue: 'mail' });
  });

  it('the transaction takes the job with it', async () => {
    // #region
    @Module({
      imports: [
        DatabaseModule,
        ScheduleModule.forRoot(),
        LeaseModule.forRoot({ connection: { url: process.env.DATABASE_URL }, migrate: true }),
      ],
      providers: [SendInvoice, Mailer, InvoicesService],
    })
    class AppModule {}
    // #endregion
    const app = await NestFactory.createApplicationContext(AppModule, { abortOnError: false });
    apps.push(app);
    const before = await app.get(JobsService).counts();
    // The DTO is checked at enqueue: the invoice, written before, is rolled back.
    await expect(app.get(InvoicesService).create('no address')).rejects.toMatchObject({ field: 'payload.to' });
    expect(await app.get(JobsService).counts()).toEqual(before);
    expect(await db.query(`SELECT FROM invoices WHERE "to" = 'no address'`)).toEqual([]);
  });

  it('claiming by hand', async () => {
    @Module({
      imports: [LeaseModule.forRoot({ role: 'producer', connection: { url: db.url }, migrate: true })],
      providers: [ReportRunner],
    })
    class AppModule {}
    const app = await NestFactory.createApplicationContext(AppModule, { abortOnError: false });
    apps.push(app);
    const jobs = app.get(JobsService);
    const [good, broken, taken] = await jobs.enqueueMany('report.build', ['fine', 'broken', 'stolen']);
    stolen.add(
      `SELECT leasehold.move_v1((SELECT json_build_array(json_build_object('job', job_id, 'token', token, 'worker', worker_id,
         'event', 'return')) FROM leasehold.leases WHERE job_id = ${taken}), true)`,
    );
    await app.get(ReportRunner).runReady();
    expect(await jobs.get(good!)).toMatchObject({ state: 'completed', result: { pages: 3 } });
    expect(await jobs.get(broken!)).toMatchObject({
      state: 'scheduled',
      runs: [{ error: { message: 'no such template' } }],
    });
    expect(await jobs.get(taken!)).toMatchObject({ state: 'ready', attempt: 0 });
    expect(await app.get(WorkersService).list({ activeOnly: true })).toEqual([]);
    // A second time in the same process, under a new registration.
    await app.get(ReportRunner).runReady();
  });

  it('named instances, and what they say', async () => {
    @Injectable()
    class Overview {
      constructor(
        readonly jobs: JobsService,
        @InjectLease(JobsService, 'reports') readonly reports: JobsService,
      ) {}
    }

    @JobHandler('report.print', { instance: 'reports' })
    class PrintReport implements Handler<string, string> {
      handle({ payload }: Job<string>): string {
        return `printed ${payload}`;
      }
    }

    // #region
    @Module({
      imports: [
        ScheduleModule.forRoot(),
        LeaseModule.forRoot({ connection: { url: process.env.DATABASE_URL }, migrate: true }),
        LeaseModule.forRoot({ name: 'reports', connection: { url: process.env.REPORTS_URL }, migrate: true }),
      ],
      providers: [Overview, PrintReport],
    })
    class AppModule {}
    // #endregion
    const app = await NestFactory.createApplicationContext(AppModule, { abortOnError: false });
    apps.push(app);
    const counts = { rescued: 0 };
    const events = app.get<LeaseEvents>(getLeaseToken(LeaseEvents, 'reports'), { strict: false });
    const seen: string[] = [];
    events.stream.subscribe(({ type }) => seen.push(type));
    // #region
    events.stream.subscribe((event) => {
      if (event.type === 'job.rescued') counts.rescued++; // event.cause, event.jobId, event.workerId, event.place, …
    });
    // #endregion
    const overview = app.get(Overview);
    const id = await overview.reports.enqueue(PrintReport, 'March');
    expect(await untilState(overview.reports, id, 'completed')).toMatchObject({ result: 'printed March' });
    await eventually(() => seen.includes('job.completed'), { state: () => seen });
    expect(await reports.query(`SELECT kind FROM leasehold.jobs`)).toEqual([{ kind: 'report.print' }]);
    expect(await db.query(`SELECT FROM leasehold.jobs WHERE kind = 'report.print'`)).toEqual([]);
    expect(counts.rescued).toBe(0);
  });

  it('migrations run by TypeORM', async () => {
    const own = await createTestDatabase({ name: 'readme_typeorm' });
    process.env.DATABASE_URL = own.url;
    try {
      // #region
      const dataSource = new DataSource({
        type: 'postgres',
        url: process.env.DATABASE_URL,
        schema: 'leasehold',
        entities: [jobEntity()],
        migrations: leaseMigrations(),
        migrationsTableName: MIGRATIONS_TABLE,
      });
      // #endregion
      await own.query('CREATE SCHEMA leasehold');
      await dataSource.initialize();
      await dataSource.runMigrations();
      await dataSource.destroy();
      const worker = await startHandWorker(own, ['a'], { options: { migrate: false } });
      expect(await worker.jobs.enqueue('a', {})).toMatch(/^\d+$/);
      await worker.close();
    } finally {
      process.env.DATABASE_URL = db.url;
      await own.drop();
    }
  });
});

describe('CONTRIBUTING.md', () => {
  // #region
  it('a completion that meets a rescue waits for it, and is told that the lease is lost', async () => {
    const worker = await startHandWorker(db, ['meeting']);
    const id = await worker.jobs.enqueue('meeting', {});
    const [claimed] = await worker.claims.claim({ kinds: ['meeting'], limit: 1 });
    const { job } = claimed!;
    const crash = JSON.stringify([{ job: job.id, token: job.token, worker: job.workerId, event: 'crash' }]);

    // The rescue has moved the lease and not committed: the gate holds its transaction open.
    const gate = await RowGate.hold(db, 'SELECT * FROM leasehold.move_v1($1::json, true)', [crash]);
    const late = worker.settle.complete(job);
    late.catch(() => undefined);
    await gate.untilWaiting(); // Now the completion stands at the row; no sleep could promise that.
    await gate.release();

    await expect(late).rejects.toThrow(LeaseLostError);
    expect(await worker.jobs.get(id)).toMatchObject({ state: 'ready', attempt: 0, crashes: 1 });
  });
  // #endregion
});

describe('the documents', () => {
  it.each(['README.md', 'libs/lease/README.md', 'CONTRIBUTING.md'])('%s shows the code of this file', (page) => {
    expectPageShowsSpec(page, 'test/readme-examples.spec.ts');
  });
});
