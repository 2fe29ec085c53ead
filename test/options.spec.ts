import type { EmbeddedPostgres } from '@leasehold/embedded-postgres';
import { type Handler, InvalidOptionError, JobHandler, type LeaseOptions } from '@leasehold/nestjs';
import { resolveOptions } from '@leasehold/nestjs/dist/options/resolve-options';
import { DataSource } from 'typeorm';
import { inspect } from 'node:util';
import { createTestDatabase, eventually, startServer, type TestDatabase } from './support';
import { bootError } from './support/boot';
import { untilState } from './support/job-states';
import { rootModule, startLeaseApp } from './support/lease-app';

/** Leads nowhere: wrong options are found before anybody connects. */
const NOWHERE = { url: 'postgres://nobody:hunter2@127.0.0.1:1/nothing' };

/** A value at a path: `at('lease.ttl', 5)` is { lease: { ttl: 5 } }. */
const at = (path: string, value: unknown): Partial<LeaseOptions> =>
  path.split('.').reduceRight<unknown>((inner, key) => ({ [key]: inner }), value) as Partial<LeaseOptions>;

const resolve = (options: Partial<LeaseOptions> = {}) => resolveOptions({ connection: NOWHERE, ...options });

describe('a wrong value is refused by its path, with the value and what is allowed', () => {
  const wrong: [path: string, ...values: unknown[]][] = [
    ['name', '', 5, 'n'.repeat(51), 'a\0'],
    ['role', 'boss', 1],
    ['migrate', 'yes', 1],
    ['workerName', '', '\ud800', 'w'.repeat(101)],
    ['queues', [], 'all', [''], [1]],
    ['store', 'own', true],
    ['lease.ttl', '299ms', '25h', 'soon', -1, NaN, Infinity],
    ['lease.beat', 49, '9h', {}],
    ['lease.maxBlocked', '29s', '25h'],
    ['rescue.session', 'on', 0],
    ['rescue.lease', 'off'],
    ['rescue.deadline', 1],
    ['rescue.every', 49, '2h'],
    ['rescue.sessionEvery', 0],
    ['rescue.sessionGrace', -1, '2h'],
    ['rescue.batch', 0, 501, 1.5, '500'],
    ['leader.probe', 49],
    ['leader.retry', 49, null],
    ['concurrency', 0, 100_001, 1.5, '50'],
    ['queueConcurrency', 5],
    ['buffer.max', -1, 100_001],
    ['buffer.age', 49],
    ['claim.maxBytes', 0, 268_435_457],
    ['suspects.patience', -1, '25h'],
    ['payloadMaxBytes', 0, 67_108_865],
    ['resultMaxBytes', 0, 67_108_865],
    ['shutdown.timeout', -1, '25h'],
    ['shutdown.grace', '1 minute'],
    ['wakeUp', 'redis', true],
    ['poll', 19, '2h'],
    ['maxAttempts', 0, 2_147_483_648, '3'],
    ['maxCrashes', 0],
    ['maxReleases', -1],
    ['maxSnoozes', -1, 1.5],
    ['checkpointMaxBytes', 0, 67_108_865],
    ['maxExtension', 999, '11y'],
    ['retention.completed', -1, 'never', '11y'],
    ['retention.failed', 'off'],
    ['retention.cancelled', {}],
    ['retention', 7],
    ['deadline', 0, 'never', '11y', '3653d'],
    ['backoff.base', -1, '11y'],
    ['backoff.max', NaN],
    ['handlers', [], 'none'],
    ['lease', 'long', []],
    ['rescue', 7],
    ['backoff', 'soon'],
    ['schema', '', 5, 's'.repeat(64), 'a$b', 'pg_x'],
    ['connection.poolMax', 1, 501, 2.5],
    ['connection.queryTimeout', 99, '2h'],
  ];
  it.each(wrong.flatMap(([path, ...values]) => values.map((value) => [path, value])))('%s = %p', (path, value) => {
    const given = at(path as string, value);
    if (given.connection) Object.assign(given.connection, NOWHERE);
    const work = () => resolve(given);
    expect(work).toThrow(InvalidOptionError);
    expect(work).toThrow(
      new RegExp(`^${(path as string).replace('.', '\\.')}(\\[0\\])? = .*(is not allowed: it must be|: must)`, 's'),
    );
  });

  it('in what a kind may set, too', () => {
    const handlers = { 'a.kind': { concurrency: 0 } };
    expect(() => resolve({ handlers })).toThrow(/^handlers\['a\.kind'\]\.concurrency = 0 is not allowed/);
    expect(() => resolve({ handlers: { k: { backoff: { base: '2d', max: '1d' } } } })).toThrow(
      /^handlers\['k'\]\.backoff\.max = 86400000 ms is below handlers\['k'\]\.backoff\.base = 172800000 ms/,
    );
    expect(() => resolve({ handlers: { k: { priority: 32_768 } } })).toThrow(/handlers\['k'\]\.priority = 32768/);
    expect(() => resolve({ handlers: { k: { queue: '' } } })).toThrow(/handlers\['k'\]\.queue = ""/);
    expect(() => resolve({ handlers: { k: { fleetConcurrency: 0 } } })).toThrow(/fleetConcurrency = 0 is not allowed/);
    expect(() => resolve({ handlers: { k: { concurrencyPerKey: 1.5 } } })).toThrow(/concurrencyPerKey = 1.5/);
    expect(() => resolve({ handlers: { k: { onLost: 'ignore' as never } } })).toThrow(
      /onLost = "ignore".*'refund', 'charge'/,
    );
    expect(() => resolve({ queueConcurrency: { mail: 0 } })).toThrow(/^queueConcurrency\['mail'\] = 0 is not allowed/);
    expect(() => resolve({ backoff: (() => 1) as never })).toThrow(
      /^backoff is a function, which only a kind may have/,
    );
  });

  it('a ttl under three beats, and what to change', () => {
    expect(() => resolve({ lease: { ttl: '2s', beat: '1s' } })).toThrow(
      /lease\.ttl = 2000 ms is under three beats of lease\.beat = 1000 ms.*at least 3000 ms.*at most 666 ms/,
    );
    expect(resolve({ lease: { ttl: '3s', beat: '1s' } }).lease).toMatchObject({ ttlMs: 3000, beatMs: 1000 });
    expect(resolve({ lease: { ttl: '1000ms' } }).lease).toMatchObject({ ttlMs: 1000, beatMs: 333 });
  });

  it('through forRoot, at boot', async () => {
    const root = rootModule(NOWHERE, { options: { concurrency: -1 } });
    expect(await bootError(root)).toMatchObject({
      code: 'INVALID_OPTION',
      message: expect.stringMatching(/^concurrency = -1/),
    });
  });
});

describe('an unknown option', () => {
  const misspelt: [path: string, meant: string][] = [
    ['conection', 'connection'],
    ['shutdwon', 'shutdown'],
    ['connection.ulr', 'url'],
    ['lease.tll', 'ttl'],
    ['rescue.sesion', 'session'],
    ['leader.prob', 'probe'],
    ['buffer.maxx', 'max'],
    ['claim.maxByte', 'maxBytes'],
    ['suspects.patince', 'patience'],
    ['shutdown.timout', 'timeout'],
    ['backoff.bas', 'base'],
    ['retention.faild', 'failed'],
  ];
  it.each(misspelt)('%s is refused, and %s suggested', (path, meant) => {
    const given = at(path, 1);
    if (given.connection) Object.assign(given.connection, NOWHERE);
    expect(() => resolve(given)).toThrow(
      new RegExp(`^There is no option '${path}'; did you mean '${meant}'\\? Allowed here: `),
    );
  });

  it('one that looks like none gets the list alone', () => {
    expect(() => resolve(at('telepathy', 1))).toThrow(/^There is no option 'telepathy'\. Allowed here: .*maxAttempts/);
    expect(() => resolve({ handlers: { k: at('concurency', 1) } })).toThrow(
      /^There is no option 'handlers\['k'\]\.concurency'; did you mean 'concurrency'\?/,
    );
  });

  it('of a decorator names the class', async () => {
    @JobHandler('options.misspelt', { maxAttemps: 3 } as object)
    class Misspelt implements Handler {
      handle(): void {}
    }
    const { message } = await bootError(rootModule(NOWHERE, { handlers: [Misspelt] }));
    expect(message).toMatch(
      /no option '@JobHandler\("options\.misspelt"\) on Misspelt\.maxAttemps'; did you mean 'maxAttempts'/,
    );
  });

  it('a near miss of a word is suggested, too', () => {
    expect(() => resolve({ role: 'wroker' as never })).toThrow(/role = "wroker".*did you mean 'worker'/);
  });
});

describe('what is not given', () => {
  it('has the documented defaults', () => {
    expect(resolve()).toMatchObject({
      name: 'default',
      role: 'both',
      schema: 'leasehold',
      migrate: false,
      queues: null,
      store: 'shared',
      lease: { ttlMs: 30_000, beatMs: 10_000, maxBlockedMs: 300_000 },
      rescue: {
        session: true,
        lease: true,
        deadline: true,
        everyMs: 5000,
        sessionEveryMs: 500,
        sessionGraceMs: 2500,
        batch: 500,
      },
      leader: { probeMs: 2000, retryMs: 1000 },
      concurrency: 50,
      queueConcurrency: {},
      buffer: { max: 1000, ageMs: 1000 },
      claim: { maxBytes: 16_777_216 },
      suspects: { patienceMs: 30_000 },
      payloadMaxBytes: 1_048_576,
      resultMaxBytes: 1_048_576,
      checkpointMaxBytes: 1_048_576,
      maxExtensionMs: 86_400_000,
      retention: { completedMs: 604_800_000, failedMs: 2_592_000_000, cancelledMs: 604_800_000 },
      shutdown: { timeoutMs: 20_000, graceMs: 5000 },
      wakeUp: 'notify',
      pollMs: 1000,
      budget: {
        maxAttempts: 20,
        maxCrashes: 3,
        maxReleases: 20,
        maxSnoozes: 1000,
        backoff: { baseMs: 1000, maxMs: 86_400_000 },
        deadlineMs: 300_000,
      },
      connection: { poolMax: 4, queryTimeoutMs: 10_000 },
    });
  });

  it.each([
    [1, 3],
    [50, 4],
    [100, 6],
    [10_000, 10],
  ])('the pool follows from a concurrency of %i: %i connections', (concurrency, poolMax) => {
    expect(resolve({ concurrency }).connection.poolMax).toBe(poolMax);
  });

  it('durations in every unit, and off', () => {
    const ms = (deadline: LeaseOptions['deadline']) =>
      resolve(deadline === undefined ? {} : { deadline }).budget.deadlineMs;
    expect([1, '500ms', '30s', '5m', '2h', '1d', '1.5h', 'off'].map((value) => ms(value as never))).toEqual([
      1,
      500,
      30_000,
      300_000,
      7_200_000,
      86_400_000,
      5_400_000,
      null,
    ]);
  });

  it('a base above the usual maximum raises it', () => {
    const { backoff } = resolve({ backoff: { base: '3d' } }).budget;
    expect(backoff).toEqual({ baseMs: 259_200_000, maxMs: 259_200_000 });
  });
});

describe('the connection', () => {
  let db: TestDatabase;
  beforeAll(async () => {
    db = await createTestDatabase();
  });
  afterAll(() => db.drop());

  @JobHandler('options.job')
  class Runs implements Handler {
    handle(): string {
      return 'ran';
    }
  }
  const works = async (connection: LeaseOptions['connection']) => {
    const app = await startLeaseApp(db, { handlers: [Runs], options: { connection } });
    expect(await untilState(app.jobs, await app.jobs.enqueue(Runs, null), 'completed')).toMatchObject({
      result: 'ran',
    });
    await app.close();
  };
  const parts = () => {
    const { hostname, port, username, password, pathname } = new URL(db.url);
    return { host: hostname, port: Number(port || 5432), username, password, database: pathname.slice(1) };
  };

  it('by url, by pg options, by a DataSource that is not initialized, by its url or its parts', async () => {
    await works({ url: db.url });
    const { username, ...others } = parts();
    await works({ options: { ...others, user: username } });
    await works({ dataSource: new DataSource({ type: 'postgres', url: db.url }) });
    await works({ dataSource: new DataSource({ type: 'postgres', ...parts() }) });
    await works({
      dataSource: new DataSource({
        type: 'postgres',
        replication: { master: parts(), slaves: [{ ...parts(), port: 1 }] },
      }),
    });
  });

  it('the pool of a DataSource is left alone: it is neither used nor closed', async () => {
    const dataSource = await new DataSource({
      type: 'postgres',
      url: db.url,
      extra: { max: 1 },
      installExtensions: false,
    }).initialize();
    try {
      await dataSource.transaction(() => works({ dataSource }));
      expect(await dataSource.query('SELECT 1 AS one')).toEqual([{ one: 1 }]);
    } finally {
      await dataSource.destroy();
    }
  });

  it('settings that cannot go to a thread: the beats run in the main one, and jobs run', async () => {
    const { username, password, ...others } = parts();
    await works({ options: { ...others, user: username, password: () => password } });
  });

  const wrongSources: [string, unknown, RegExp][] = [
    ['none', {}, /exactly one of 'url', 'dataSource' and 'options'; it has none/],
    ['two', { url: NOWHERE.url, options: {} }, /it has url, options/],
    ['another scheme', { url: 'mysql://nobody:hunter2@host/db' }, /connection\.url must begin with postgres:\/\//],
    ['no text', { url: 5 }, /connection\.url must begin with/],
    [
      'a port that is none',
      { url: 'postgres://nobody:hunter2@host:port/db' },
      /connection\.url cannot be read \(ERR_INVALID_URL\)/,
    ],
    [
      'a wrong directUrl',
      { url: NOWHERE.url, directUrl: 'nobody:hunter2@host' },
      /connection\.directUrl must begin with/,
    ],
    ['the url itself', NOWHERE.url, /connection must be an object such as \{ url \}, not string/],
    ['nothing', undefined, /connection must be an object such as \{ url \}, not undefined/],
    ['options as text', { options: NOWHERE.url }, /connection\.options must be an object .*, not string/],
    ['a DataSource as text', { dataSource: NOWHERE.url }, /connection\.dataSource must be an object .*, not string/],
    ['half a DataSource', { dataSource: {} }, /connection\.dataSource\.options must be an object/],
    [
      'another database',
      { dataSource: { options: { type: 'sqlite', password: 'hunter2' } } },
      /connection\.dataSource = "sqlite"/,
    ],
  ];
  it.each(wrongSources)('%s is refused, and no password is shown', async (_, connection, message) => {
    const error = await bootError(rootModule(NOWHERE, { options: { connection } as Partial<LeaseOptions> }));
    expect(error).toBeInstanceOf(InvalidOptionError);
    expect(error.message).toMatch(message);
    expect(inspect(error, { depth: 9, showHidden: true })).not.toContain('hunter2');
  });

  it('options that are a url are refused without showing it', () => {
    const work = () => resolveOptions(NOWHERE.url as never);
    expect(work).toThrow(/^The options must be an object such as \{ connection: \{ url \} \}, not string$/);
  });

  it('a server that is not there: the boot fails, and no password is shown', async () => {
    const error = await bootError(rootModule(NOWHERE));
    expect(error.message).not.toBe('the application started');
    expect(inspect(error, { depth: 9, showHidden: true })).not.toContain('hunter2');
  });
});

describe("F:B5 the server's limit", () => {
  let server: EmbeddedPostgres;
  beforeAll(async () => {
    // Three are kept for superusers: seventeen are left.
    server = await startServer({ settings: { max_connections: '20', superuser_reserved_connections: '3' } });
  });

  const options = (role: LeaseOptions['role'], poolMax: number): Partial<LeaseOptions> => ({
    ...(role ? { role } : {}),
    connection: { url: server.url, poolMax },
  });

  it.each([
    ['both', 15, 16, 18],
    ['producer', 17, 18, 18],
  ] as const)(
    'F:B5 a pool of role %s may be as large as %i, and with %i it is a boot error that names the option',
    async (role, fits, over, needs) => {
      const app = await startLeaseApp(server, { options: options(role, fits) });
      await eventually(() => app.jobs.counts());
      await app.close();
      const error = await bootError(rootModule(server, { options: options(role, over) }));
      expect(error).toBeInstanceOf(InvalidOptionError);
      expect(error.message).toMatch(
        new RegExp(
          `^connection\\.poolMax = ${over} needs ${needs} connections .* the server allows 17 in all: lower connection\\.poolMax`,
        ),
      );
    },
  );
});
