import { setTimeout as sleep } from 'node:timers/promises';
import { Injectable, Module, Scope, type Type } from '@nestjs/common';
import { SchedulerRegistry, ScheduleModule } from '@nestjs/schedule';
import {
  ClaimService,
  type Handler,
  InjectLease,
  JobHandler,
  JobsService,
  LeaderCron,
  LeaderService,
  LeaseModule,
  RescueService,
  WorkersService,
  getLeaseToken,
} from '@leasehold/nestjs';
import { createTestDatabase, eventually, type TestDatabase } from './support';
import { boot, bootError, close, leaseModule, moduleOf } from './support/boot';
import { untilState } from './support/job-states';
import { QUICK } from './support/lease-app';

const schedule = ScheduleModule.forRoot();

/** A handler class that returns `result`. */
function handlerOf(kind: string, result: unknown = null, options = {}): Type<Handler> {
  @JobHandler(kind, options)
  class Answering implements Handler {
    handle(): unknown {
      return result;
    }
  }
  return Answering;
}

let db: TestDatabase;
let other: TestDatabase;

beforeAll(async () => {
  db = await createTestDatabase();
  other = await createTestDatabase({ name: 'module_other' });
});

afterAll(async () => {
  await db.drop();
  await other.drop();
});

describe('one LeaseModule a name', () => {
  it('F:H1 a second forRoot of the same name is a boot error that names both places', async () => {
    const twice = moduleOf({ imports: [schedule, leaseModule(db), moduleOf({ imports: [forRootElsewhere()] })] });
    const { message } = await bootError(twice);
    expect(message).toMatch(/imported twice for instance 'default'/);
    for (const place of [/boot\.[jt]s:\d+/, /module\.spec\.[jt]s:\d+/]) expect(message).toMatch(place);
  });

  it('F:H1 forRootAsync counts too', async () => {
    const useFactory = () => ({ connection: { url: db.url } });
    const root = moduleOf({ imports: [schedule, leaseModule(db), LeaseModule.forRootAsync({ useFactory })] });
    const { message } = await bootError(root);
    for (const place of [/boot\.[jt]s:\d+/, /module\.spec\.[jt]s:\d+/]) expect(message).toMatch(place);
  });

  it('F:H1 one and the same dynamic module may be imported in many places', async () => {
    const lease = leaseModule(db);
    const app = await boot(
      moduleOf({ imports: [schedule, lease, moduleOf({ imports: [lease] }), moduleOf({ imports: [lease] })] }),
    );
    expect(app.get(JobsService)).toBeDefined();
  });

  it('F:H1 a handler class that two modules provide runs each job once', async () => {
    let runs = 0;
    @JobHandler('module.shared')
    class Shared implements Handler {
      handle(): void {
        runs++;
      }
    }
    const root = moduleOf({
      imports: [schedule, leaseModule(db), moduleOf({ providers: [Shared] }), moduleOf({ providers: [Shared] })],
    });
    const jobs = (await boot(root)).get(JobsService);
    await untilState(jobs, await jobs.enqueue(Shared, null), 'completed');
    expect(runs).toBe(1);
  });

  it('F:H1 two applications in one process are fine', async () => {
    const ids: string[] = [];
    for (const kind of ['module.app1', 'module.app2']) {
      const jobs = (
        await boot(moduleOf({ imports: [schedule, leaseModule(db)], providers: [handlerOf(kind, kind)] }))
      ).get(JobsService);
      ids.push(await jobs.enqueue(kind, null));
      expect((await untilState(jobs, ids.at(-1) ?? '', 'completed')).result).toBe(kind);
    }
  });
});

const forRootElsewhere = () => LeaseModule.forRoot({ connection: { url: db.url } });

describe('instances', () => {
  @JobHandler('module.instance')
  class Here implements Handler {
    handle = undefined as never;
  }

  it('two named instances run their own jobs, each on its own database, even of one kind', async () => {
    @JobHandler('module.instance')
    class InDefault implements Handler {
      handle(): string {
        return 'default';
      }
    }
    @JobHandler('module.instance', { instance: 'reports' })
    class InReports implements Handler {
      handle(): string {
        return 'reports';
      }
    }
    @Injectable()
    class Both {
      constructor(
        readonly jobs: JobsService,
        @InjectLease(JobsService, 'reports') readonly reports: JobsService,
      ) {}
    }
    const root = moduleOf({
      imports: [schedule, leaseModule(db), leaseModule(other, { name: 'reports' })],
      providers: [InDefault, InReports, Both],
    });
    const { jobs, reports } = (await boot(root)).get(Both);
    const id = await jobs.enqueue(InDefault, null);
    const reportId = await reports.enqueue(InReports, null);
    expect((await untilState(jobs, id, 'completed')).result).toBe('default');
    expect((await untilState(reports, reportId, 'completed')).result).toBe('reports');
    const countIn = async (where: TestDatabase) =>
      (await where.one<{ n: string }>(`SELECT count(*) AS n FROM leasehold.jobs WHERE kind = 'module.instance'`)).n;
    expect([await countIn(db), await countIn(other)]).toEqual(['1', '1']);
    await expect(jobs.enqueue(InReports, null)).rejects.toThrow(/no class decorated .* instance 'default'/);
  });

  it('a handler of an instance that is not there is a boot error with a suggestion', async () => {
    @JobHandler('module.typo', { instance: 'reprots' })
    class Lost implements Handler {
      handle(): void {}
    }
    const root = moduleOf({
      imports: [
        schedule,
        leaseModule(db, { role: 'producer' }),
        leaseModule(other, { name: 'reports', role: 'producer' }),
      ],
      providers: [Lost],
    });
    expect((await bootError(root)).message).toMatch(
      /@JobHandler\("module\.typo"\) on Lost: .*no lease instance 'reprots'.*did you mean 'reports'/,
    );
  });

  it.each(['reprots', undefined])(
    '@LeaderCron of an instance that is not there (%s) is a boot error',
    async (instance) => {
      @Injectable()
      class Cleaner {
        @LeaderCron('0 0 1 1 *', instance === undefined ? {} : { instance })
        clean(): void {}
      }
      const root = moduleOf({ imports: [schedule, leaseModule(db, { name: 'reports' })], providers: [Cleaner] });
      expect((await bootError(root)).message).toMatch(
        new RegExp(
          `@LeaderCron asks for lease instance '${instance ?? 'default'}', which this application does not have`,
        ),
      );
    },
  );

  it('forRootAsync takes its options from other modules, and its name stands outside', async () => {
    @Injectable()
    class Config {
      readonly url = db.url;
    }
    const config = moduleOf({ providers: [Config], exports: [Config] });
    const root = moduleOf({
      imports: [
        schedule,
        LeaseModule.forRootAsync({
          name: 'async',
          imports: [config],
          inject: [Config],
          useFactory: async ({ url }: Config) => ({ ...QUICK, connection: { url }, concurrency: 3 }),
        }),
      ],
      providers: [handlerOf('module.async', 1, { instance: 'async' })],
    });
    const jobs = (await boot(root)).get<JobsService>(getLeaseToken(JobsService, 'async'));
    await untilState(jobs, await jobs.enqueue('module.async', null), 'completed');
    const renamed = LeaseModule.forRootAsync({
      name: 'async',
      useFactory: () => ({ connection: { url: db.url }, name: 'else' }),
    });
    expect((await bootError(moduleOf({ imports: [schedule, renamed] }))).message).toMatch(
      /name = "else".*beside useFactory/,
    );
  });

  it('a class without handle() is a boot error that names it', async () => {
    const root = moduleOf({ imports: [schedule, leaseModule(db)], providers: [Here] });
    expect((await bootError(root)).message).toMatch(/module\.instance.* on Here: the class has no method handle/);
  });
});

describe('handlers', () => {
  it('R27 a kind registered twice fails the start and names both classes', async () => {
    @JobHandler('module.twice')
    class First implements Handler {
      handle(): void {}
    }
    @JobHandler('module.twice')
    class Second implements Handler {
      handle(): void {}
    }
    const root = moduleOf({ imports: [schedule, leaseModule(db)], providers: [First, Second] });
    expect((await bootError(root)).message).toMatch(/Kind 'module\.twice' has two handlers: First and Second/);
  });

  it('without ScheduleModule the boot error shows the line to add', async () => {
    expect((await bootError(moduleOf({ imports: [leaseModule(db)] }))).message).toMatch(
      /add ScheduleModule\.forRoot\(\) to your root module's imports/,
    );
  });

  it("the module's `handlers` win over the decorator, and a kind that nobody provides is refused", async () => {
    const provider = handlerOf('module.configured', 1, { queue: 'decorated', maxAttempts: 2, priority: 5 });
    const handlers = { 'module.configured': { queue: 'configured', maxAttempts: 7 } };
    const app = await boot(moduleOf({ imports: [schedule, leaseModule(db, { handlers })], providers: [provider] }));
    const jobs = app.get(JobsService);
    const job = await untilState(jobs, await jobs.enqueue('module.configured', null), 'completed');
    expect(job).toMatchObject({ queue: 'configured', maxAttempts: 7, priority: 5 });
    await close(app);

    const misspelt = leaseModule(db, { handlers: { 'module.configurde': {} } });
    expect((await bootError(moduleOf({ imports: [schedule, misspelt], providers: [provider] }))).message).toMatch(
      /handlers\['module\.configurde'\].*did you mean 'module\.configured'/,
    );
  });

  it('a wrong option in the decorator names the class', async () => {
    const provider = handlerOf('module.wrong', 1, { concurrency: 0 });
    expect(
      (await bootError(moduleOf({ imports: [schedule, leaseModule(db)], providers: [provider] }))).message,
    ).toMatch(/@JobHandler\("module\.wrong"\) on Answering\.concurrency = 0 is not allowed/);
  });

  it('R27 F:D6 a job of a kind that nobody here handles stays ready, unharmed and visible', async () => {
    const app = await boot(moduleOf({ imports: [schedule, leaseModule(db)], providers: [handlerOf('module.known')] }));
    const jobs = app.get(JobsService);
    const [unknown = ''] = await jobs.enqueueMany('module.unknown', [1, 2, 3], { maxAttempts: 1 });
    await untilState(jobs, await jobs.enqueue('module.known', null), 'completed');
    expect(await jobs.unhandledKinds()).toContain('module.unknown');
    expect(await jobs.unhandledKinds()).not.toContain('module.known');
    expect(await jobs.get(unknown)).toMatchObject({ state: 'ready', attempt: 0, runs: [] });

    const knows = moduleOf({ imports: [schedule, leaseModule(db)], providers: [handlerOf('module.unknown', 'done')] });
    await boot(knows);
    expect((await untilState(jobs, unknown, 'completed')).result).toBe('done');
    expect(await jobs.unhandledKinds()).not.toContain('module.unknown');
  });
});

describe('scopes', () => {
  let made = 0;
  const fresh = () => ++made;

  @Injectable({ scope: Scope.REQUEST })
  class Tenant {
    readonly no = fresh();
  }
  @Injectable()
  class Repository {
    constructor(readonly tenant: Tenant) {}
  }
  @Injectable()
  class Service {
    constructor(readonly repository: Repository) {}
  }
  @Injectable({ scope: Scope.REQUEST, durable: true })
  class DurableTenant {
    readonly no = fresh();
  }

  @JobHandler('module.request', { scope: Scope.REQUEST })
  class InRequest implements Handler {
    readonly no = fresh();
    handle(): number {
      return this.no;
    }
  }
  @JobHandler('module.transient', { scope: Scope.TRANSIENT })
  class Transient implements Handler {
    readonly no = fresh();
    handle(): number {
      return this.no;
    }
  }
  @JobHandler('module.below')
  class Below implements Handler {
    constructor(private readonly service: Service) {}
    handle(): number {
      return this.service.repository.tenant.no;
    }
  }
  @JobHandler('module.durable')
  class Durable implements Handler {
    constructor(private readonly tenant: DurableTenant) {}
    handle(): number {
      return this.tenant.no;
    }
  }
  @JobHandler('module.factory')
  class FromFactory implements Handler {
    constructor(private readonly no: number) {}
    handle(): number {
      return this.no;
    }
  }

  const cases: [string, Type<Handler<unknown, number>>, object[]][] = [
    ['request-scoped', InRequest, []],
    ['transient', Transient, []],
    ['with a request-scoped dependency three levels below', Below, [Service, Repository, Tenant]],
    ['with a durable dependency', Durable, [DurableTenant]],
  ];
  it.each(cases)('F:J8 a handler that is %s is made anew for each job', async (_, handler, more) => {
    const providers = [handler, ...(more as Type[])];
    const jobs = (await boot(moduleOf({ imports: [schedule, leaseModule(db)], providers }))).get(JobsService);
    const ids = await jobs.enqueueMany(handler, Array<null>(20).fill(null));
    const seen = [];
    for (const id of ids) seen.push((await untilState<number>(jobs, id, 'completed')).result);
    expect(new Set(seen).size).toBe(20);
    expect(seen.every((no) => typeof no === 'number')).toBe(true);
  });

  it('F:J8 a singleton handler serves all jobs, also one made by a factory or given as a value', async () => {
    @JobHandler('module.value')
    class Value implements Handler {
      handle(): number {
        return 0;
      }
    }
    class Fake implements Handler {
      handle(): number {
        return 17;
      }
    }
    const providers = [
      { provide: FromFactory, useFactory: () => new FromFactory(fresh()) },
      { provide: Value, useValue: new Fake() },
    ];
    const jobs = (await boot(moduleOf({ imports: [schedule, leaseModule(db)], providers }))).get(JobsService);
    const results = async (handler: Type<Handler>) => {
      const ids = await jobs.enqueueMany(handler, [1, 2, 3]);
      return Promise.all(ids.map(async (id) => (await untilState(jobs, id, 'completed')).result));
    };
    expect(new Set(await results(FromFactory as never)).size).toBe(1);
    expect(await results(Value)).toEqual([17, 17, 17]);
  });

  it('F:J8 a handler provided under a token of its own, in request scope, is found and resolved by it', async () => {
    const providers = [{ provide: 'own token', useClass: Below }, Service, Repository, Tenant];
    const jobs = (await boot(moduleOf({ imports: [schedule, leaseModule(db)], providers }))).get(JobsService);
    await untilState(jobs, await jobs.enqueue(Below, null), 'completed');
  });
});

describe('the order of things', () => {
  let ready = false;
  const slow = async () => {
    await sleep(300);
  };
  class SlowModule {
    async onModuleInit(): Promise<void> {
      await slow();
    }
    async onApplicationBootstrap(): Promise<void> {
      await slow();
      ready = true;
    }
  }

  @JobHandler('module.order')
  class Order implements Handler {
    handle(): boolean {
      return ready;
    }
  }

  const orders: [string, () => Type][] = [
    ['before', () => moduleOf({ imports: [schedule, moduleOf({}, SlowModule), leaseModule(db)], providers: [Order] })],
    ['after', () => moduleOf({ imports: [schedule, leaseModule(db), moduleOf({}, SlowModule)], providers: [Order] })],
    [
      'inside a module that imports',
      () => moduleOf({ imports: [schedule, moduleOf({ imports: [leaseModule(db)] }, SlowModule)], providers: [Order] }),
    ],
    ['at the root, above', () => moduleOf({ imports: [schedule, leaseModule(db)], providers: [Order] }, SlowModule)],
  ];
  it.each(orders)('F:J7 no job starts before a slow module %s ours has bootstrapped', async (_, root) => {
    ready = false;
    const producer = await boot(moduleOf({ imports: [schedule, leaseModule(db, { role: 'producer' })] }));
    const ids = await producer.get(JobsService).enqueueMany(Order, [1, 2, 3]);
    const jobs = (await boot(root())).get(JobsService);
    for (const id of ids) expect((await untilState(jobs, id, 'completed')).result).toBe(true);
  });

  it.each(['onModuleInit', 'onApplicationBootstrap'])(
    'F:J7 when another module fails in %s, no job is leased and no session stays',
    async (hook) => {
      @Module({})
      class Failing {
        constructor(private readonly cron: SchedulerRegistry) {}
        fail(): void {
          // A process whose boot failed ends; this one goes on, and Nest leaves its timers behind.
          for (const job of this.cron.getCronJobs().values()) void job.stop();
          throw new Error('no licence');
        }
      }
      Object.defineProperty(Failing.prototype, hook, {
        value(this: Failing) {
          this.fail();
        },
      });
      const producer = await boot(moduleOf({ imports: [schedule, leaseModule(db, { role: 'producer' })] }));
      const id = await producer.get(JobsService).enqueue(Order, null);
      await close(producer);
      for (const imports of [
        [schedule, moduleOf({}, Failing as Type), leaseModule(db)],
        [schedule, leaseModule(db), moduleOf({}, Failing as Type)],
      ]) {
        expect((await bootError(moduleOf({ imports, providers: [Order] }))).message).toBe('no licence');
        expect(await sessions()).toEqual([]);
      }
      const where = await db.one(`SELECT job_id FROM leasehold.ready WHERE job_id = $1`, [id]);
      expect(where).toEqual({ job_id: id });
    },
  );
});

describe('roles', () => {
  it("a producer claims nothing, and starts no beat and no leader; a worker's jobs of the same kind run", async () => {
    const producer = await boot(
      moduleOf({
        imports: [schedule, leaseModule(db, { role: 'producer' })],
        providers: [handlerOf('module.produced')],
      }),
    );
    const jobs = producer.get(JobsService);
    const id = await jobs.enqueue('module.produced', null);
    expect(producer.get(WorkersService).current).toBeUndefined();
    expect(() => producer.get(WorkersService).currentId).toThrow(/not registered/);
    expect(producer.get(LeaderService).isLeader).toBe(false);
    expect(await sessions()).toEqual(['leasehold']);
    for (const service of [ClaimService, RescueService]) expect(producer.get(service)).toBeInstanceOf(service);
    expect(await producer.get(WorkersService).list({ activeOnly: true })).toEqual([]);
    expect((await jobs.get(id)).state).toBe('ready');

    await boot(
      moduleOf({ imports: [schedule, leaseModule(db, { role: 'worker' })], providers: [handlerOf('module.produced')] }),
    );
    await untilState(jobs, id, 'completed');
  });

  it('a producer needs no ScheduleModule', async () => {
    const app = await boot(moduleOf({ imports: [leaseModule(db, { role: 'producer' })] }));
    expect(await app.get(JobsService).enqueue('module.unscheduled', null)).toMatch(/^\d+$/);
  });

  it('R36 @LeaderCron fires on one of two applications, is in the SchedulerRegistry, and passes on with the lead', async () => {
    const ticks: { name: string; leads: boolean }[] = [];
    const appOf = async (name: string) => {
      @Injectable()
      class Cleaner {
        constructor(private readonly leader: LeaderService) {}

        @LeaderCron('* * * * * *', { name: 'clean' })
        clean(): void {
          ticks.push({ name, leads: this.leader.isLeader });
        }
      }
      return boot(moduleOf({ imports: [ScheduleModule.forRoot(), leaseModule(db)], providers: [Cleaner] }));
    };
    const [first, second] = [await appOf('first'), await appOf('second')];
    for (const app of [first, second]) expect(app.get(SchedulerRegistry).doesExist('cron', 'clean')).toBe(true);
    const leads = (app: typeof first) => app.get(LeaderService).isLeader;
    // The lead may change on a machine that stands still for a moment.
    await eventually(() => ticks.length >= 3, { state: () => ticks });
    expect(ticks.every((tick) => tick.leads)).toBe(true);
    await eventually(() => leads(first) !== leads(second));
    const [leader, follower, name] = leads(first) ? [first, second, 'first'] : [second, first, 'second'];
    await close(leader);
    const before = ticks.length;
    await eventually(() => leads(follower) && ticks.length > before, { state: () => ticks });
    expect(ticks.slice(before).some((tick) => tick.name === name)).toBe(false);
  });
});

/** Names of the sessions of this library in the database. */
async function sessions(): Promise<string[]> {
  const rows = await db.query<{ application_name: string }>(
    `SELECT DISTINCT application_name FROM pg_stat_activity
     WHERE datname = current_database() AND backend_type = 'client backend' AND application_name NOT LIKE 'lh_test%'`,
  );
  return rows.map(({ application_name }) => application_name);
}
