import { execFile } from 'node:child_process';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { type Handler, JobHandler, MIGRATIONS_TABLE, SchemaError, migrationSql } from '@leasehold/nestjs';
import { DataSource } from 'typeorm';
import { ormOptions } from '../ormconfig';
import { createTestDatabase, fixture, startProcess, type TestDatabase } from './support';
import { bootError } from './support/boot';
import { untilState } from './support/job-states';
import { rootModule, startLeaseApp } from './support/lease-app';

const run = promisify(execFile);
const ROOT = join(__dirname, '..', '..');
const CLI = join(ROOT, 'libs', 'lease', 'bin', 'leasehold.js');

@JobHandler('migrations.job')
class Runs implements Handler {
  handle(): string {
    return 'ran';
  }
}

let db: TestDatabase;
beforeEach(async () => {
  db = await createTestDatabase();
});
afterEach(() => db.drop());

/** A job runs in an application that is not allowed to migrate. */
async function runsUnmigrated(schema = 'leasehold'): Promise<void> {
  const app = await startLeaseApp(db, { handlers: [Runs], options: { schema, migrate: false } });
  expect(await untilState(app.jobs, await app.jobs.enqueue(Runs, null), 'completed')).toMatchObject({ result: 'ran' });
  await app.close();
}

const recorded = (schema = 'leasehold') =>
  db.query<{ name: string }>(`SELECT name FROM "${schema}"."${MIGRATIONS_TABLE}" ORDER BY id`);

const relations = async (schema = 'leasehold') =>
  (
    await db.query<{ name: string }>(
      `SELECT relname AS name FROM pg_class WHERE relnamespace = $1::regnamespace
       UNION ALL SELECT proname FROM pg_proc WHERE pronamespace = $1::regnamespace ORDER BY name`,
      [`"${schema}"`],
    )
  ).map(({ name }) => name);

describe('booting', () => {
  it('F:J10 twenty instances at once, some of them processes, on an empty database: one migrates, all start', async () => {
    const workers = Array.from({ length: 3 }, () => startProcess(fixture('worker'), { env: { LEASE_URL: db.url } }));
    const producers = Array.from({ length: 17 }, () =>
      startLeaseApp(db, { options: { role: 'producer', connection: { url: db.url, poolMax: 2 } } }),
    );
    const apps = await Promise.all(producers);
    await Promise.all(workers.map((worker) => worker.next((message) => 'ready' in message)));
    expect((await recorded()).length).toBe(new Set((await recorded()).map(({ name }) => name)).size);
    const ids = await Promise.all(apps.map(({ jobs }) => jobs.enqueue('scripted', {})));
    for (const id of ids) await untilState((apps[0] ?? (await startLeaseApp(db))).jobs, id, 'completed');
    for (const worker of workers) worker.kill('SIGKILL');
    await Promise.all(workers.map((worker) => worker.exited));
  });

  it('F:J10 a migration that fails half-way leaves nothing behind, and the next boot does it again', async () => {
    await db.query('CREATE SCHEMA leasehold');
    await db.query('CREATE VIEW leasehold.job_runs AS SELECT 1 AS in_the_way');
    expect((await bootError(rootModule(db))).message).toMatch(/"job_runs" already exists/);
    expect(await recorded()).toEqual([]);
    expect(await relations()).not.toContain('jobs');
    await db.query('DROP VIEW leasehold.job_runs');
    await (await startLeaseApp(db)).close();
    await runsUnmigrated();
  });

  it('without migrate a missing schema is a SchemaError that says what to do, and makes nothing', async () => {
    const error = await bootError(rootModule(db, { options: { migrate: false, schema: 'My jobs' } }));
    expect(error).toBeInstanceOf(SchemaError);
    expect(error.message).toMatch(
      /^Schema My jobs lacks Core\d{13}\. Set migrate: true, run TypeORM's migration:run, or .*/,
    );
    expect(error.message).toContain(`npx leasehold migration-sql --schema "My jobs"`);
    expect(await db.query(`SELECT FROM pg_namespace WHERE nspname = 'My jobs'`)).toEqual([]);
  });

  it('a schema newer than this code is accepted', async () => {
    await (await startLeaseApp(db)).close();
    await db.query(`INSERT INTO leasehold.migrations (timestamp, name) VALUES (9999999999999, 'Later9999999999999')`);
    await runsUnmigrated();
  });
});

describe('leasehold migration-sql', () => {
  it.each(['leasehold', 'DBA "own"'])(
    'F:E10 what it prints, run by a DBA in schema %s, is what the module needs',
    async (schema) => {
      const { stdout } = await run(process.execPath, [CLI, 'migration-sql', '--schema', schema]);
      expect(stdout).toBe(await migrationSql(schema));
      await db.query(stdout);
      await runsUnmigrated(schema);
    },
  );

  it('run twice it changes nothing the second time, and says so by failing', async () => {
    const sql = await migrationSql();
    await db.query(sql);
    const before = await relations();
    const again = await db.client();
    await expect(again.query(sql)).rejects.toThrow(/already exists/);
    await again.query('ROLLBACK');
    expect(await relations()).toEqual(before);
    expect(await recorded()).toHaveLength(1);
  });

  it('--after prints only what is new', async () => {
    const [{ name } = { name: '' }] = await (async () => {
      await db.query(await migrationSql());
      return recorded();
    })();
    const { stdout } = await run(process.execPath, [CLI, 'migration-sql', '--after', name]);
    expect(stdout).not.toContain('leasehold.jobs');
    await db.query(stdout);
    expect(await recorded()).toHaveLength(1);
  });

  const wrong: [string[], number, RegExp][] = [
    [[], 2, /^Usage: leasehold migration-sql/],
    [['migrate'], 2, /^Usage/],
    [['migration-sql', '--schem', 'x'], 2, /^Usage/],
    [['migration-sql', '--schema'], 2, /^Usage/],
    [['migration-sql', '--schema', 'a$b'], 1, /^schema = "a\$b": must not contain/],
    [['migration-sql', '--after', 'Nope'], 1, /^No migration is called Nope; there are: Core\d{13}/],
  ];
  it.each(wrong)('%j ends with code %i and says why', async (args, code, message) => {
    await expect(run(process.execPath, [CLI, ...args])).rejects.toMatchObject({
      code,
      stderr: expect.stringMatching(message),
      stdout: '',
    });
  });
});

describe('TypeORM', () => {
  const typeorm = (...args: string[]) =>
    run(
      process.execPath,
      [join(ROOT, 'node_modules', 'typeorm', 'cli.js'), '-d', join(ROOT, 'dist', 'ormconfig.js'), ...args],
      {
        env: { ...process.env, DATABASE_URL: db.url },
      },
    );

  it('its command line runs the migrations, and the module accepts them', async () => {
    await db.query('CREATE SCHEMA leasehold');
    const { stdout } = await typeorm('migration:run');
    expect(stdout).toMatch(/Core\d{13} has been executed successfully/);
    await runsUnmigrated();
  });

  it('finds nothing to do after the module has migrated', async () => {
    await (await startLeaseApp(db)).close();
    expect((await typeorm('migration:run')).stdout).toMatch(/No migrations are pending/);
    expect(await recorded()).toHaveLength(1);
  });

  it('down refuses while jobs are unfinished, and else leaves nothing', async () => {
    const app = await startLeaseApp(db, { options: { role: 'producer' } });
    const id = await app.jobs.enqueue('migrations.left', 1);
    await app.close();
    const source = await new DataSource(ormOptions(db.url)).initialize();
    try {
      await expect(source.undoLastMigration()).rejects.toThrow(
        /1 unfinished jobs are in "leasehold"; nothing was dropped/,
      );
      expect(await relations()).toContain('jobs');
      await db.query('DELETE FROM leasehold.ready WHERE job_id = $1', [id]);
      await source.undoLastMigration();
      expect((await relations()).filter((name) => !/^(migrations|PK_)/.test(name))).toEqual([]);
      await source.runMigrations();
    } finally {
      await source.destroy();
    }
    await runsUnmigrated();
  });
});
