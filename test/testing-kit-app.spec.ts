import {
  type Handler,
  JobHandler,
  JobsService,
  type Lease,
  LeaseModule,
  LeaseSetupError,
  WorkersService,
} from '@leasehold/nestjs';
import {
  ForeignWorkerError,
  LeaseTesting,
  LeaseTestingModule,
  type LeaseTestingOptions,
} from '@leasehold/nestjs/testing';
import { type INestApplicationContext, Injectable, Logger, Module, type Provider } from '@nestjs/common';
import { NestFactory } from '@nestjs/core';
import { Test } from '@nestjs/testing';
import { type TestDatabase, createTestDatabase, eventually, gate, startLeaseApp } from './support';

@Injectable()
class Script {
  work: (lease: Lease) => unknown = () => undefined;
}

@JobHandler('tick')
class Tick implements Handler<number> {
  constructor(private readonly script: Script) {}
  async handle(_job: unknown, lease: Lease): Promise<void> {
    await this.script.work(lease);
  }
}

@JobHandler('report.tick', { instance: 'reports' })
class ReportTick implements Handler<number> {
  handle(): void {}
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

async function start(options: Partial<LeaseTestingOptions> = {}, handlers: Provider[] = [Tick]) {
  const app = await Test.createTestingModule({
    imports: [LeaseTestingModule.forRoot({ connection: { url: db.url }, ...options })],
    providers: [Script, ...handlers],
  }).compile();
  apps.push(app);
  await app.init();
  return { app, lease: app.get(LeaseTesting), jobs: app.get(JobsService), script: app.get(Script) };
}

describe('the application under test', () => {
  @Module({
    imports: [
      LeaseModule.forRootAsync({
        useFactory: () => ({
          connection: { url: process.env.KIT_URL! },
          migrate: true,
          role: process.env.KIT_ROLE as 'both',
        }),
      }),
    ],
    providers: [Script, Tick],
  })
  class AppModule {}

  it('a real module, as a producer', async () => {
    Object.assign(process.env, { KIT_URL: db.url, KIT_ROLE: 'producer' });
    const app = await NestFactory.createApplicationContext(AppModule, { abortOnError: false });
    apps.push(app);
    const lease = await LeaseTesting.of(app);
    await app.get(JobsService).enqueue(Tick, 1, { delay: '1h' });
    await lease.advance('1h');
    expect(await lease.drain()).toMatchObject([{ outcome: 'completed' }]);
    expect(await (await LeaseTesting.of(app)).drain()).toEqual([]);
    await expect(LeaseTesting.of(app, 'defualt')).rejects.toThrow(
      `there is no lease instance 'defualt' in this application; did you mean 'default'?`,
    );
    expect(await app.get(WorkersService).list({ activeOnly: true })).toMatchObject([{ name: 'testing', inFlight: 0 }]);
    await app.close();
    expect(await db.query('SELECT state FROM leasehold.workers')).toEqual([{ state: 'stopped' }]);
    expect(await db.query('SELECT shift_us FROM leasehold_clock.clock')).toEqual([{ shift_us: '0' }]);
  });

  it('is refused when it runs jobs by itself, or has no lease', async () => {
    const worker = await startLeaseApp(db);
    await expect(LeaseTesting.of(worker.app)).rejects.toThrow(/role: 'both'.*give LeaseModule role: 'producer'/);
    // Nor may a worker be up beside the kit.
    const { lease } = await start();
    await expect(lease.drain()).rejects.toThrow(ForeignWorkerError);
    await worker.close();
    expect(await lease.drain()).toEqual([]);
    const bare = await Test.createTestingModule({}).compile();
    await expect(LeaseTesting.of(bare)).rejects.toThrow(LeaseSetupError);
    const idle = await start({ schema: 'no_handlers' }, []);
    await expect(idle.lease.drain()).rejects.toThrow('No handler is provided');
  });

  it('closing aborts what runs, gives it back, and leaves no session', async () => {
    const { app, lease, jobs, script } = await start();
    const started = gate();
    script.work = ({ signal }) => {
      started.open();
      return new Promise((_, reject) => signal.addEventListener('abort', () => reject(signal.reason as Error)));
    };
    const id = await jobs.enqueue(Tick, 1);
    const run = lease.runNext();
    await started.promise;
    await app.close();
    expect(await run).toMatchObject({ outcome: 'released', job: { id, state: 'ready', attempt: 0, releases: 1 } });
    const sessions = `SELECT FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'leasehold%'`;
    await eventually(async () => (await db.query(sessions)).length === 0);
    await expect(lease.drain()).rejects.toThrow(/shut down/);
  });

  it('two at once on two schemas, one of them a named instance with options from elsewhere', async () => {
    const first = await start();
    const app = await Test.createTestingModule({
      imports: [
        LeaseTestingModule.forRootAsync({
          name: 'reports',
          useFactory: () => ({ connection: { url: db.url }, schema: 'odd "name' }),
        }),
      ],
      providers: [Script, ReportTick],
    }).compile();
    apps.push(app);
    await app.init();
    const reports = await LeaseTesting.of(app, 'reports');
    const jobs = app.get(JobsService, { strict: false });
    await jobs.enqueue(ReportTick, 1, { delay: '1d' });
    await first.jobs.enqueue(Tick, 0, { delay: '1d' });
    await reports.advance('1d');
    expect(await reports.drain()).toHaveLength(1);
    expect(await first.lease.drain()).toEqual([]);
    await first.lease.expectNotEnqueued('report.tick');
  });
});
