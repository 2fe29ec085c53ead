import { execFileSync, spawn } from 'node:child_process';
import { chmodSync, chownSync, cpSync, existsSync, lstatSync, mkdirSync, mkdtempSync, readdirSync } from 'node:fs';
import { rmSync, statSync, writeFileSync, readFileSync } from 'node:fs';
import { connect } from 'node:net';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import {
  EmbeddedPostgresError,
  startEmbeddedPostgres,
  type EmbeddedPostgresOptions,
} from '@leasehold/embedded-postgres';
import { unprivilegedAccount } from '@leasehold/embedded-postgres/dist/account';
import { usableBinaries } from '@leasehold/embedded-postgres/dist/binaries';
import { nativeFolder } from '@leasehold/embedded-postgres/dist/platform-package';
import { eventually } from './support/eventually';
import { onServer } from './support/on-server';
import { fixture, startProcess, type StartProcessOptions, type TestProcess } from './support/processes';
import { startServer } from './support/servers';

interface Told extends Record<string, unknown> {
  kind: string;
  pid: number;
  url: string;
  dir: string;
}

const isRoot = process.getuid?.() === 0;
const asRoot = isRoot ? it : it.skip;
let scratch: string;

beforeAll(() => {
  scratch = mkdtempSync(join(tmpdir(), 'leasehold test '));
  chmodSync(scratch, 0o755);
});

afterAll(() => rmSync(scratch, { recursive: true, force: true }));

async function owner(
  options: EmbeddedPostgresOptions = {},
  how: StartProcessOptions = {},
): Promise<{ parent: TestProcess; server: Told }> {
  const parent = startProcess(fixture('embedded-server'), { ...how, args: [JSON.stringify(options)] });
  return { parent, server: await parent.next<Told>(({ kind }) => kind === 'started', 30_000) };
}

/** Whether anything listens. Id 1 of a container may not reap, so a process counts as gone by what it held. */
async function answers(url: string): Promise<boolean> {
  return new Promise((resolve) => {
    const socket = connect(Number(new URL(url).port), '127.0.0.1');
    socket.once('connect', () => resolve(true));
    socket.once('error', () => resolve(false));
    socket.once('connect', () => socket.destroy());
  });
}

async function untilGone({ url, dir }: Told): Promise<void> {
  await eventually(async () => !(await answers(url)), { what: 'End of the server' });
  await eventually(() => !existsSync(dirname(dir)), { what: 'Removal of the temporary folder', state: () => dir });
}

async function codeOf(start: Promise<{ stop(): Promise<void> }>): Promise<string> {
  try {
    await (await start).stop();
    return 'started';
  } catch (error) {
    if (!(error instanceof EmbeddedPostgresError)) throw error;
    expect(error.message.length).toBeGreaterThan(40);
    return error.code;
  }
}

describe('a temporary server', () => {
  it('serves the database that was asked for, on 127.0.0.1 only, with the settings of the caller', async () => {
    const server = await startServer({
      database: 'my "own" db',
      settings: { work_mem: '5MB', application_name: 'a b' },
    });
    const { rows } = await onServer(server.url, (client) =>
      client.query(`
        SELECT current_database() AS db, current_setting('listen_addresses') AS host, current_setting('fsync') AS fsync,
               current_setting('work_mem') AS mem, current_setting('max_connections') AS connections,
               current_setting('wal_level') AS wal, current_setting('unix_socket_directories') AS sockets`),
    );
    expect(rows).toEqual([
      {
        db: 'my "own" db',
        host: '127.0.0.1',
        fsync: 'off',
        mem: '5MB',
        connections: '200',
        wal: 'replica',
        sockets: '',
      },
    ]);
    expect(server.url).toContain(`127.0.0.1:${server.port}/`);
  });

  it('is gone with its folder after stop, which can be called twice', async () => {
    const server = await startEmbeddedPostgres();
    await Promise.all([server.stop(), server.stop()]);
    await server.stop();
    expect(await answers(server.url)).toBe(false);
    expect(existsSync(dirname(server.dataDir))).toBe(false);
    await expect(server.restart()).rejects.toMatchObject({ code: 'STOPPED' });
  });

  it.each(['fast', 'immediate'] as const)(
    'keeps what was committed over a %s restart, on the same port',
    async (mode) => {
      const server = await startServer();
      const former = server.pid;
      await onServer(server.url, (client) => client.query('CREATE TABLE kept AS SELECT 42 AS n'));
      await server.restart(mode);
      const { rows } = await onServer(server.url, (client) => client.query('SELECT n FROM kept'));
      expect(rows).toEqual([{ n: 42 }]);
      expect(server.pid).not.toBe(former);
    },
  );

  it('can be started several times at once', async () => {
    const servers = await Promise.all([startServer(), startServer(), startServer()]);
    expect(new Set(servers.map(({ port }) => port)).size).toBe(3);
  });

  it('fails with what the server said when a setting is wrong, and leaves no folder', async () => {
    const own = join(scratch, 'failing');
    mkdirSync(own);
    chmodSync(own, 0o777);
    const settings = { work_mem: 'plenty' };
    const parent = startProcess(fixture('embedded-server'), {
      env: { TMPDIR: own },
      args: [JSON.stringify({ settings })],
    });
    await parent.untilExit();
    expect(parent.output).toMatch(/START_FAILED/);
    expect(parent.output).toMatch(/invalid value for parameter "work_mem"/);
    expect(readdirSync(own)).toEqual([]);
  });
});

describe('when the owner of a server ends', () => {
  it('by SIGKILL, no server and no folder is left', async () => {
    const { parent, server } = await owner();
    parent.kill('SIGKILL');
    await untilGone(server);
  });

  it('by SIGKILL after a restart, no server is left', async () => {
    // Kept data: a server whose folder is taken away would end by itself.
    const { parent, server } = await owner({ dataDir: join(scratch, 'restarted') });
    parent.send('restart');
    const restarted = await parent.next<Told>(({ kind }) => kind === 'restarted');
    expect(restarted.pid).not.toBe(server.pid);
    parent.kill('SIGKILL');
    await eventually(async () => !(await answers(server.url)));
  });

  it('by SIGKILL while the server is only being made, nothing is left', async () => {
    const own = join(scratch, 'early');
    mkdirSync(own, { mode: 0o777 });
    chmodSync(own, 0o777);
    for (const ms of [150, 250, 350, 500, 700]) {
      const parent = startProcess(fixture('embedded-server'), { env: { TMPDIR: own } });
      await new Promise((resolve) => setTimeout(resolve, ms));
      parent.kill('SIGKILL');
      await parent.exited;
    }
    await eventually(() => readdirSync(own).length === 0, { state: () => readdirSync(own, { recursive: true }) });
    await eventually(() => !commands().includes(own), { state: commands });
  });

  it('by SIGKILL while kept data is only being made, the next start works', async () => {
    for (const ms of [250, 350, 450]) {
      const dataDir = join(scratch, `early ${ms}`);
      const parent = startProcess(fixture('embedded-server'), { args: [JSON.stringify({ dataDir })] });
      await new Promise((resolve) => setTimeout(resolve, ms));
      parent.kill('SIGKILL');
      await parent.exited;
      await eventually(() => !commands().includes(dataDir), { state: commands });
      expect(await codeOf(startEmbeddedPostgres({ dataDir }))).toBe('started');
    }
  });

  it('by SIGKILL with kept data, the server is shut down cleanly and the data stays', async () => {
    const dataDir = join(scratch, 'killed', 'with space');
    const { parent, server } = await owner({ dataDir });
    await onServer(server.url, (client) => client.query('CREATE TABLE kept AS SELECT 42 AS n'));
    parent.kill('SIGKILL');
    // At once: the guard of the killed one is still at work.
    const next = await startServer({ dataDir, database: 'leasehold' });
    const { rows } = await onServer(next.url, (client) => client.query('SELECT n FROM kept'));
    expect(rows).toEqual([{ n: 42 }]);
    expect(existsSync(join(dataDir, 'backup_label.old'))).toBe(false);
  });

  it.each(['SIGTERM', 'SIGINT'] as const)(
    '%s to its group leaves the server up until it has drained',
    async (signal) => {
      const { parent, server } = await owner({}, { detached: true });
      process.kill(-parent.pid, signal);
      await parent.next(({ kind }) => kind === 'drained');
      await parent.untilExit();
      await untilGone(server);
    },
  );

  it('on its own, without stop, the server ends too', async () => {
    const { parent, server } = await owner();
    parent.kill('SIGTERM');
    expect(await parent.untilExit()).toEqual({ code: 0, signal: null });
    await untilGone(server);
  });
});

function commands(): string {
  return execFileSync('ps', ['-eo', 'args'], { encoding: 'utf8' });
}

describe('kept data', () => {
  it('survives a stop, and is durable unless told otherwise', async () => {
    const dataDir = join(scratch, 'kept');
    const first = await startServer({ dataDir });
    await onServer(first.url, (client) => client.query('CREATE TABLE kept AS SELECT 42 AS n'));
    await first.stop();
    const second = await startServer({ dataDir });
    const { rows } = await onServer(second.url, (client) =>
      client.query(`SELECT n, current_setting('fsync') AS fsync FROM kept`),
    );
    expect(rows).toEqual([{ n: 42, fsync: 'on' }]);
  });

  it('is refused while another server uses it', async () => {
    const dataDir = join(scratch, 'used');
    await startServer({ dataDir });
    expect(await codeOf(startEmbeddedPostgres({ dataDir }))).toBe('DATA_DIR_IN_USE');
  });

  it('opens although a leftover postmaster.pid names a process of the same account that lives', async () => {
    const dataDir = join(scratch, 'stale');
    await (await startEmbeddedPostgres({ dataDir })).stop();
    const stranger = spawn('sleep', ['60'], { ...(await unprivilegedAccount()), stdio: 'ignore' });
    writeFileSync(join(dataDir, 'postmaster.pid'), `${stranger.pid}\n${dataDir}\n1700000000\n5432\n\n127.0.0.1\n`);
    expect(await codeOf(startEmbeddedPostgres({ dataDir }))).toBe('started');
    stranger.kill();
  });

  it('of another major version is refused and left alone', async () => {
    const dataDir = join(scratch, 'older');
    mkdirSync(dataDir);
    writeFileSync(join(dataDir, 'PG_VERSION'), '13\n');
    expect(await codeOf(startEmbeddedPostgres({ dataDir }))).toBe('DATA_DIR_VERSION');
    expect(readFileSync(join(dataDir, 'PG_VERSION'), 'utf8')).toBe('13\n');
  });

  it('is not made among files of somebody else, which keep their owner', async () => {
    const dataDir = join(scratch, 'full');
    mkdirSync(dataDir);
    writeFileSync(join(dataDir, 'thesis.txt'), 'precious');
    expect(await codeOf(startEmbeddedPostgres({ dataDir }))).toBe('DATA_DIR_NOT_EMPTY');
    expect(statSync(join(dataDir, 'thesis.txt')).uid).toBe(process.getuid?.());
  });

  it('is not made where the account that runs the server cannot get', async () => {
    const dir = join(scratch, 'file');
    writeFileSync(dir, '');
    expect(await codeOf(startEmbeddedPostgres({ dataDir: join(dir, 'data') }))).toBe('DATA_DIR_UNREACHABLE');
  });

  asRoot('in a folder private to root is refused, and nothing is left of the try', async () => {
    const secret = join(scratch, 'private');
    mkdirSync(secret, { mode: 0o700 });
    expect(await codeOf(startEmbeddedPostgres({ dataDir: join(secret, 'one', 'two') }))).toBe('DATA_DIR_UNREACHABLE');
    expect(readdirSync(secret)).toEqual([]);
  });

  asRoot('of root is given to the account that serves it', async () => {
    const dataDir = join(scratch, 'of root');
    await (await startEmbeddedPostgres({ dataDir })).stop();
    execFileSync('chown', ['-R', '0:0', dataDir]);
    chmodSync(dataDir, 0o755);
    expect(await codeOf(startEmbeddedPostgres({ dataDir }))).toBe('started');
  });
});

/** An account that every system has, and that is not the one that root falls back to. */
function daemon(): { uid: number; gid: number } {
  const idOf = (flag: string): number => Number(execFileSync('id', [flag, 'daemon'], { encoding: 'utf8' }));
  return { uid: idOf('-u'), gid: idOf('-g') };
}

describe('accounts', () => {
  asRoot('one without a name is told what it needs', async () => {
    const parent = startProcess(fixture('embedded-server'), { account: { uid: 54_321, gid: 54_321 } });
    await parent.untilExit();
    expect(parent.output).toMatch(/line in \/etc\/passwd/);
  });

  asRoot(
    'an ordinary account starts its own server, and root serves the data of that account as that account',
    async () => {
      const account = daemon();
      const home = join(scratch, 'home');
      mkdirSync(home);
      chownSync(home, account.uid, account.gid);
      const dataDir = join(home, 'data');
      const { parent, server } = await owner({ dataDir }, { account });
      await onServer(server.url, (client) => client.query('CREATE TABLE kept AS SELECT 42 AS n'));
      parent.send('stop');
      await parent.untilExit();

      const { pid, stop, url } = await startEmbeddedPostgres({ dataDir }).then((started) => ({
        pid: started.pid,
        url: started.url,
        stop: () => started.stop(),
      }));
      expect(execFileSync('ps', ['-o', 'uid=', '-p', String(pid)], { encoding: 'utf8' }).trim()).toBe(
        String(account.uid),
      );
      const { rows } = await onServer(url, (client) => client.query('SELECT n FROM kept'));
      expect(rows).toEqual([{ n: 42 }]);
      await stop();

      const again = await owner({ dataDir }, { account });
      again.parent.send('stop');
      expect(await again.parent.untilExit()).toEqual({ code: 0, signal: null });
    },
  );

  asRoot('an ordinary account is refused the data of another', async () => {
    const dataDir = join(scratch, 'of another');
    mkdirSync(dataDir, { mode: 0o755 });
    const parent = startProcess(fixture('embedded-server'), {
      account: daemon(),
      args: [JSON.stringify({ dataDir })],
    });
    await parent.untilExit();
    expect(parent.output).toMatch(/DATA_DIR_OWNER/);
  });
});

describe('binaries', () => {
  it('are copied, with their links, from a folder that the account cannot reach or nobody can change', async () => {
    const secret = join(scratch, 'node modules');
    mkdirSync(secret);
    cpSync(nativeFolder(), join(secret, 'native'), { recursive: true, verbatimSymlinks: true });
    for (const name of readdirSync(join(secret, 'native', 'lib'))) {
      const file = join(secret, 'native', 'lib', name);
      if (lstatSync(file).isSymbolicLink()) rmSync(file);
    }
    const closed = isRoot ? secret : join(secret, 'native', 'lib');
    chmodSync(closed, isRoot ? 0o700 : 0o555);
    const work = mkdtempSync(join(scratch, 'work '));
    chmodSync(work, 0o755);
    try {
      const account = await unprivilegedAccount();
      const found = await usableBinaries({ account, cwd: '/' }, work, join(secret, 'native'));
      expect(found).toMatchObject({ majorVersion: '18', postgres: join(work, 'native', 'bin', 'postgres') });
    } finally {
      chmodSync(closed, 0o755);
    }
  });

  it('that do not exist for a platform, or were not installed, are named with the remedy', () => {
    expect(() => nativeFolder('win32-x64')).toThrow(/win32-x64: set DATABASE_URL/);
    const missing = (): never => {
      throw new Error('Cannot find module');
    };
    expect(() => nativeFolder('linux-x64', missing)).toThrow(
      expect.objectContaining({ code: 'PLATFORM_PACKAGE_MISSING', message: expect.stringMatching(/DATABASE_URL/) }),
    );
  });
});
