import { type INestApplicationContext, type ModuleMetadata, Module, type Provider, type Type } from '@nestjs/common';
import { ScheduleModule, SchedulerRegistry } from '@nestjs/schedule';
import { Test } from '@nestjs/testing';
import {
  BatchesService,
  ClaimService,
  HeartbeatService,
  JobsService,
  LeaderService,
  LeaseEvents,
  type LeaseEvent,
  LeaseModule,
  type LeaseOptions,
  RescueService,
  SettleService,
  WorkerLifecycle,
  WorkersService,
} from '@leasehold/nestjs';
import type { TestDatabase } from './test-database';

/** Times that suit a test: beats twice a second, a worker is dead after 3 s. */
export const QUICK: Partial<LeaseOptions> = {
  migrate: true,
  lease: { ttl: '3s', beat: '500ms' },
  rescue: { every: '200ms', sessionEvery: '200ms', sessionGrace: '400ms' },
  leader: { probe: '500ms', retry: '100ms' },
  poll: '200ms',
  shutdown: { timeout: '2s', grace: '500ms' },
};

export interface LeaseApp {
  app: INestApplicationContext;
  jobs: JobsService;
  batches: BatchesService;
  claims: ClaimService;
  settle: SettleService;
  heartbeat: HeartbeatService;
  rescue: RescueService;
  leader: LeaderService;
  workers: WorkersService;
  lifecycle: WorkerLifecycle;
  /** Everything that this process's events said, in order. */
  events: LeaseEvent[];
  close: () => Promise<void>;
}

interface AppSettings {
  handlers?: Provider[];
  options?: Partial<LeaseOptions>;
  imports?: ModuleMetadata['imports'];
  /** Instead of the database's own URL, for example a proxy's. */
  url?: string;
}

export const rootModule = (
  db: Pick<TestDatabase, 'url'>,
  { handlers = [], options = {}, imports = [], url }: AppSettings = {},
): Type => {
  class TestModule {}
  Module({
    imports: [
      ScheduleModule.forRoot(),
      ...imports,
      LeaseModule.forRoot({ ...QUICK, connection: { url: url ?? db.url }, ...options }),
    ],
    providers: handlers,
  })(TestModule);
  return TestModule;
};

const open = new Set<LeaseApp>();

/** A Nest application with the lease module on this database, started. Closed after the test at the latest. */
export async function startLeaseApp(db: Pick<TestDatabase, 'url'>, settings: AppSettings = {}): Promise<LeaseApp> {
  const app = await Test.createTestingModule({ imports: [rootModule(db, settings)] }).compile();
  try {
    await app.init();
  } catch (error) {
    // Nest runs no stop hooks after a failed start, and the process of a real application ends. This one goes on.
    for (const job of app.get(SchedulerRegistry).getCronJobs().values()) void job.stop();
    throw error;
  }
  const events: LeaseEvent[] = [];
  app.get(LeaseEvents).stream.subscribe((event) => events.push(event));
  const leaseApp: LeaseApp = {
    app,
    jobs: app.get(JobsService),
    batches: app.get(BatchesService),
    claims: app.get(ClaimService),
    settle: app.get(SettleService),
    heartbeat: app.get(HeartbeatService),
    rescue: app.get(RescueService),
    leader: app.get(LeaderService),
    workers: app.get(WorkersService),
    lifecycle: app.get(WorkerLifecycle),
    events,
    close: async () => {
      if (open.delete(leaseApp)) await app.close();
    },
  };
  open.add(leaseApp);
  return leaseApp;
}

/** Registers the process as a worker that claims by hand: a producer's application plus a registration and beats. */
export async function startHandWorker(
  db: Pick<TestDatabase, 'url'>,
  kinds: string[],
  settings: AppSettings = {},
): Promise<LeaseApp> {
  const leaseApp = await startLeaseApp(db, { ...settings, options: { role: 'producer', ...settings.options } });
  const identity = await leaseApp.workers.register(kinds);
  await leaseApp.heartbeat.start(identity, () => undefined);
  const close = leaseApp.close.bind(leaseApp);
  leaseApp.close = async () => {
    await leaseApp.heartbeat.stop();
    await close();
  };
  return leaseApp;
}

export async function closeLeaseApps(): Promise<void> {
  for (const leaseApp of [...open]) await leaseApp.close();
}

if (typeof afterEach === 'function') afterEach(closeLeaseApps);
