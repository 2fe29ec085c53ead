import { Client, Pool } from 'pg';
import { eventually } from './eventually';
import { gate } from './gate';
import { fixture, startProcess } from './processes';
import { RowGate } from './row-gate';
import { caughtUp, promote, startServer, startStandby } from './servers';
import { onServer } from './on-server';
import { TcpProxy } from './tcp-proxy';
import { createTestDatabase, type TestDatabase } from './test-database';

let db: TestDatabase;

beforeAll(async () => {
  // Rivals that update one row after the other, whatever the isolation that the run asks for.
  db = await createTestDatabase({ settings: { default_transaction_isolation: 'read committed' } });
  await db.query('CREATE TABLE items (id int PRIMARY KEY, n int NOT NULL DEFAULT 0)');
  await db.query('INSERT INTO items (id) SELECT generate_series(1, 20)');
});

afterAll(() => db.drop());

describe('eventually', () => {
  it('returns the first truthy value, and takes a throw for not yet', async () => {
    let tries = 0;
    const value = await eventually(() => {
      if (++tries < 3) throw new Error('not yet');
      return tries > 4 && `after ${tries}`;
    });
    expect(value).toBe('after 5');
  });

  it('R38 tells the last error, the state and both clocks when it gives up', async () => {
    const failing = eventually(
      () => {
        expect(1).toBe(2);
      },
      { timeoutMs: 100, state: () => ({ jobs: ['one'] }), what: 'The miracle' },
    );
    await expect(failing).rejects.toThrow(/The miracle did not happen in 100 ms \(\d+ tries\)/);
    await expect(failing).rejects.toThrow(/toBe/);
    await expect(failing).rejects.toThrow(/State: \{ jobs: \[ 'one' \] \}/);
    await expect(failing).rejects.toThrow(/Clock here 20\d\d-\S+Z, of the database 20\d\d-\S+Z/);
  });

  it('gives up on a try that never ends', async () => {
    const stuck = eventually(() => new Promise<boolean>(() => undefined), { timeoutMs: 100 });
    await expect(stuck).rejects.toThrow(/no try came to an end/);
  });
});

describe('TestDatabase', () => {
  it('has the settings that were asked for, and goes away', async () => {
    const own = await createTestDatabase({ name: 'Own-One', settings: { statement_timeout: '1234ms' } });
    expect(own.name).toMatch(/^lh_test_[0-9a-f]+_own_one_[0-9a-f]{6}$/);
    expect(await own.one('SHOW statement_timeout')).toEqual({ statement_timeout: '1234ms' });
    await own.drop();
    expect(await db.query('SELECT FROM pg_database WHERE datname = $1', [own.name])).toEqual([]);
  });

  it('tells of a session that was left behind, with its advisory lock, and ends it', async () => {
    const own = await createTestDatabase({ name: 'leaky' });
    const leak = new Client({ connectionString: own.url, application_name: 'forgetful' });
    leak.on('error', () => undefined);
    await leak.connect();
    await leak.query('SELECT pg_advisory_lock(7)');
    await expect(own.drop()).rejects.toThrow(/"forgetful" idle, 1 advisory locks: SELECT pg_advisory_lock\(7\)/);
    expect(await db.query('SELECT FROM pg_database WHERE datname = $1', [own.name])).toEqual([]);
    await leak.end().catch(() => undefined);
  });
});

describe('gates', () => {
  it('a gate opens once, for all', async () => {
    const door = gate<number>();
    expect(door.isOpen).toBe(false);
    door.open(1);
    door.open(2);
    expect([await door.promise, door.isOpen]).toEqual([1, true]);
  });

  it('a RowGate shows who waits at it, also behind another, and lets them go on', async () => {
    const hold = await RowGate.hold(db, 'SELECT id FROM items WHERE id = $1 FOR UPDATE', [1]);
    expect(hold.rows).toEqual([{ id: 1 }]);
    expect(await hold.waiters()).toBe(0);
    const [first, second] = [await db.client('first'), await db.client('second')];
    const sql = 'UPDATE items SET n = n + 1 WHERE id = 1';
    const updates = [first.query(sql), second.query(sql)];
    const waiting = await hold.untilWaiting(2);
    expect(waiting.map(({ application_name }) => application_name).sort()).toEqual(['first', 'second']);
    await hold.release();
    await Promise.all(updates);
    expect(await db.one('SELECT n FROM items WHERE id = 1')).toEqual({ n: 2 });
  });

  it('a RowGate rolls back', async () => {
    const hold = await RowGate.hold(db, 'UPDATE items SET n = 99 WHERE id = 2');
    await hold.rollback();
    expect(await db.one('SELECT n FROM items WHERE id = 2')).toEqual({ n: 0 });
  });
});

describe('startProcess', () => {
  it('speaks with the child, whatever the order of the messages', async () => {
    const child = startProcess(fixture('echo'));
    await child.next(({ echo }) => echo === 'ready');
    child.send('a');
    child.send('b');
    await child.next(({ echo }) => echo === 'b');
    await child.next(({ echo }) => echo === 'a');
    child.kill('SIGKILL');
    expect(await child.exited).toEqual({ code: null, signal: 'SIGKILL' });
  });

  it('tells what a child wrote that ended, or did not answer', async () => {
    const child = startProcess(fixture('echo'));
    await expect(child.next(({ echo }) => echo === 'never', 300)).rejects.toThrow(/sent no message that fits.*300 ms/);
    child.send('crash');
    await expect(child.next(({ echo }) => echo === 'never')).rejects.toThrow(/ended \(3\)[^]*crashing as told/);
    await expect(child.next(({ echo }) => echo === 'never')).rejects.toThrow(/ended \(3\)/);
  });

  it('freezes a child and wakes it', async () => {
    const child = startProcess(fixture('echo'));
    await child.next(({ echo }) => echo === 'ready');
    child.kill('SIGSTOP');
    child.send('late');
    await expect(child.next(({ echo }) => echo === 'late', 200)).rejects.toThrow(/200 ms/);
    child.kill('SIGCONT');
    await child.next(({ echo }) => echo === 'late');
  });
});

describe('TcpProxy', () => {
  let proxy: TcpProxy;
  const clients: Client[] = [];

  beforeEach(async () => {
    proxy = await TcpProxy.start(db.url);
  });

  afterEach(async () => {
    await proxy.close();
    await Promise.all(clients.splice(0).map((client) => client.end().catch(() => undefined)));
  });

  async function client(name: string): Promise<Client> {
    const made = new Client({
      connectionString: proxy.url(db.url),
      application_name: name,
      connectionTimeoutMillis: 1_000,
    });
    made.on('error', () => undefined);
    clients.push(made);
    await made.connect();
    return made;
  }

  /** How a query went within a moment. */
  async function outcome(query: Promise<unknown>, ms = 300): Promise<string> {
    const late = new Promise<string>((resolve) => setTimeout(resolve, ms, 'no answer'));
    return Promise.race([query.then(() => 'answer').catch(() => 'error'), late]);
  }

  it('passes everything on, big rows too', async () => {
    const one = await client('one');
    const { rows } = await one.query<{ length: number; text: string }>(`SELECT repeat('x', 5000000) AS text`);
    expect(rows[0]?.text.length).toBe(5_000_000);
    const { rows: back } = await one.query<{ n: number }>('SELECT length($1::text) AS n', ['y'.repeat(5_000_000)]);
    expect(back).toEqual([{ n: 5_000_000 }]);
    expect(proxy.names).toEqual(['one']);
  });

  it('freezes without an end, and thaws with nothing lost', async () => {
    const one = await client('one');
    proxy.freeze();
    const query = one.query('UPDATE items SET n = n + 1 WHERE id = 3');
    expect(await outcome(query)).toBe('no answer');
    expect(await db.one('SELECT n FROM items WHERE id = 3')).toEqual({ n: 0 });
    await expect(client('two')).rejects.toThrow(/timeout/);
    proxy.thaw();
    await query;
    expect(await db.one('SELECT n FROM items WHERE id = 3')).toEqual({ n: 1 });
  });

  it('freezes one application only, those of its sessions that come later as well', async () => {
    const [heart, work] = [await client('heart'), await client('work')];
    proxy.freeze({ applicationName: /^heart/ });
    const beat = heart.query('SELECT 1');
    expect(await outcome(beat)).toBe('no answer');
    expect(await outcome(work.query('SELECT 1'))).toBe('answer');
    await expect(client('heart2')).rejects.toThrow(/timeout/);
    await client('work2');
    proxy.thaw({ applicationName: /^heart/ });
    expect(await outcome(beat)).toBe('answer');
    await client('heart3');
  });

  it('cuts one application, or all', async () => {
    const [one, two] = [await client('one'), await client('two')];
    expect(proxy.cut({ applicationName: 'one' })).toBe(1);
    expect(await outcome(one.query('SELECT 1'))).toBe('error');
    expect(await outcome(two.query('SELECT 1'))).toBe('answer');
    expect(proxy.cut()).toBe(1);
    expect(await outcome(two.query('SELECT 1'))).toBe('error');
    proxy.refuse();
    await expect(client('three')).rejects.toThrow();
    proxy.refuse(false);
    await client('three');
  });

  it('loses the reply of a request that was carried out, committed and all', async () => {
    const pool = new Pool({ connectionString: proxy.url(db.url), max: 1 });
    pool.on('error', () => undefined);
    const loss = proxy.dropRepliesAfter(/SET n = \$1/);
    await pool.query('SELECT 1');
    await expect(pool.query('UPDATE items SET n = $1 WHERE id = 4', [44])).rejects.toThrow();
    await loss.happened;
    expect(await db.one('SELECT n FROM items WHERE id = 4')).toEqual({ n: 44 });
    await pool.query('UPDATE items SET n = $1 WHERE id = 4', [45]);
    expect([loss.count, await db.one('SELECT n FROM items WHERE id = 4')]).toEqual([1, { n: 45 }]);
    await pool.end();
  });

  it('loses the reply to a COMMIT of one application', async () => {
    const [one, two] = [await client('one'), await client('two')];
    const loss = proxy.dropRepliesAfter(/COMMIT/, { applicationName: 'two' });
    for (const each of [one, two]) await each.query('BEGIN');
    await one.query('UPDATE items SET n = 5 WHERE id = 5');
    await two.query('UPDATE items SET n = 6 WHERE id = 6');
    await one.query('COMMIT');
    expect(await outcome(two.query('COMMIT'), 5_000)).toBe('error');
    expect(loss.count).toBe(1);
    expect(await db.query('SELECT n FROM items WHERE id IN (5, 6) ORDER BY id')).toEqual([{ n: 5 }, { n: 6 }]);
  });

  it('slows the line down', async () => {
    const one = await client('one');
    proxy.delay(150);
    const began = performance.now();
    await one.query('SELECT 1');
    expect(performance.now() - began).toBeGreaterThanOrEqual(290);
    proxy.delay(0);
    await one.query('SELECT 1');
  });
});

describe('servers', () => {
  it('a standby follows its primary, refuses to write, and is promoted', async () => {
    const primary = await startServer({ database: 'app' });
    await onServer(primary.url, (client) => client.query('CREATE TABLE t AS SELECT 1 AS n'));
    const standby = await startStandby(primary, { database: 'app' });
    await onServer(primary.url, (client) => client.query('INSERT INTO t VALUES (2)'));
    await caughtUp(primary, standby);
    const { rows } = await onServer(standby.url, (client) => client.query('SELECT n FROM t ORDER BY n'));
    expect(rows).toEqual([{ n: 1 }, { n: 2 }]);
    const write = (): Promise<unknown> => onServer(standby.url, (client) => client.query('INSERT INTO t VALUES (3)'));
    await expect(write()).rejects.toMatchObject({ code: '25006' });
    await promote(standby);
    await write();
    await primary.restart('immediate');
    const { rows: old } = await onServer(primary.url, (client) => client.query('SELECT n FROM t ORDER BY n'));
    expect(old).toEqual([{ n: 1 }, { n: 2 }]);
  });
});
