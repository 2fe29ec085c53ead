import { mkdirSync, mkdtempSync, readFileSync, rmSync, symlinkSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createTestDatabase, eventually, startProcess, type TestDatabase, type TestProcess } from './support';

const MAIN = join(__dirname, '..', 'apps', 'demo', 'src', 'main.js');
const RUN_MS = 90_000;

interface Page {
  jobs: { id: string }[];
  next: string | null;
}

let database: TestDatabase;
let scratch: string;
let folder: string;

beforeAll(async () => {
  database = await createTestDatabase();
  scratch = mkdtempSync(join(tmpdir(), 'leasehold demo '));
  folder = join(scratch, 'documents');
  mkdirSync(join(folder, 'deep', 'deeper'), { recursive: true });
  for (let i = 0; i < 148; i++) {
    writeFileSync(
      join(folder, i % 2 === 0 ? 'deep' : '.', `note-${i}.md`),
      `# Note ${i}\n\nSome words and [a link](missing-${i}.md).\n\n\`\`\`js\n1;\n\`\`\`\n`,
    );
  }
  writeFileSync(join(folder, 'latin1.txt'), Buffer.from('caf\u00e9 au lait', 'latin1'));
  writeFileSync(join(folder, 'empty.txt'), '');
  writeFileSync(join(folder, 'image.md'), Buffer.from([0x89, 0x50, 0x4e, 0x47, 0x00, 0x00]));
  writeFileSync(join(folder, 'noise.txt'), Buffer.from([1, 2, 3, 4, 5, 6, 7, 65]));
  writeFileSync(join(folder, 'ignored.bin'), 'not a document');
  symlinkSync(folder, join(folder, 'deep', 'loop'));
});

afterAll(async () => {
  await database.drop();
  rmSync(scratch, { recursive: true, force: true });
});

function demo(args: string[], env: Record<string, string | undefined> = {}): TestProcess {
  return startProcess(MAIN, { args, env: { DATABASE_URL: database.url, ...env } });
}

async function untilSaid(process: TestProcess, what: RegExp): Promise<RegExpExecArray> {
  return eventually(() => what.exec(process.output), {
    what: `"${what.source}"`,
    timeoutMs: 30_000,
    state: () => process.output,
  });
}

/** Each worker holds connections for as long as it lives, a frozen one too. */
async function untilNobodyIsConnected(): Promise<void> {
  await eventually(
    async () => {
      const sessions = await database.query(
        `SELECT pid, application_name FROM pg_stat_activity
         WHERE datname = current_database() AND application_name <> 'lh_test' AND backend_type = 'client backend'`,
      );
      expect(sessions).toEqual([]);
      return true;
    },
    { what: 'End of all processes' },
  );
}

describe('a run with both faults', () => {
  it(
    'indexes every file exactly once, though a worker is killed and another wakes up too late',
    async () => {
      const run = demo([folder, '--json', '--report', join(scratch, 'report')]);
      expect(await run.untilExit(RUN_MS)).toEqual({ code: 0, signal: null });
      const lines = run.lines.filter((line) => line.startsWith('{'));
      expect(lines).toHaveLength(1);
      const summary = JSON.parse(lines[0] ?? '');
      expect(Object.keys(summary)).toEqual([
        'files',
        'completed',
        'failed',
        'rescued',
        'deadRuns',
        'refusedWrites',
        'stranded',
        'recoveryMs',
      ]);
      expect(summary).toMatchObject({ files: 152, completed: 150, failed: 2, stranded: 0 });
      expect(summary.rescued.session).toBeGreaterThanOrEqual(1);
      expect(summary.rescued.lease).toBeGreaterThanOrEqual(1);
      expect(summary.deadRuns).toBeGreaterThanOrEqual(2);
      expect(summary.refusedWrites).toBeGreaterThanOrEqual(1);
      expect(summary.recoveryMs).toBeGreaterThan(0);
      expect(summary.recoveryMs).toBeLessThan(15_000);

      const report = JSON.parse(readFileSync(join(scratch, 'report', 'leasehold-report.json'), 'utf8'));
      expect(report.failures).toEqual([
        { path: 'image.md', reason: expect.stringContaining('zero byte') },
        { path: 'noise.txt', reason: expect.stringContaining('control characters') },
      ]);
      expect(report.encodings).toEqual({ 'utf-8': 149, latin1: 1 });
      expect(report.codeLanguages).toEqual({ js: 148 });
      expect(report.totals.brokenLinks).toBe(148);
      expect(readFileSync(join(scratch, 'report', 'leasehold-report.txt'), 'utf8')).toContain('Broken relative links');
      await untilNobodyIsConnected();
      expect(await database.query(`SELECT nspname FROM pg_namespace WHERE nspname LIKE 'leasehold%'`)).toEqual([]);
    },
    RUN_MS,
  );

  it(
    'leaves no process behind when it is killed, not even a frozen one',
    async () => {
      const run = demo([folder, '--report', scratch, '--workers', '2']);
      await untilSaid(run, /is frozen/);
      run.kill('SIGKILL');
      await run.untilExit();
      await untilNobodyIsConnected();
    },
    RUN_MS,
  );

  it('shuts everything down on SIGTERM', async () => {
    const run = demo([folder, '--report', scratch]);
    await untilSaid(run, /is killed/);
    run.kill('SIGTERM');
    expect(await run.untilExit()).toEqual({ code: 143, signal: null });
    await untilNobodyIsConnected();
  });
});

describe('--serve', () => {
  it('answers until it is told to end', async () => {
    const run = demo([folder, '--no-faults', '--workers', '1', '--serve', '--report', scratch]);
    const [, url = ''] = await untilSaid(run, /stays up until Ctrl-C: (\S+)\/jobs/);
    const get = async (path: string) => {
      const response = await fetch(`${url}/${path}`);
      return { status: response.status, body: (await response.json()) as Page };
    };
    expect(await get('jobs/counts')).toMatchObject({ status: 200, body: { completed: 151, failed: 2, running: 0 } });
    const failed = await get('jobs?state=failed&limit=1');
    expect(failed.body).toMatchObject({ jobs: [{ state: 'failed', outcome: 'failed' }], next: expect.any(String) });
    const rest = await get(`jobs?state=failed&after=${failed.body.next}`);
    expect(rest.body).toMatchObject({ jobs: [{ state: 'failed' }], next: null });
    expect((await get(`jobs/${rest.body.jobs[0]?.id}`)).body).toMatchObject({ kind: 'document.index', runs: [] });
    expect((await get('workers')).body).toMatchObject({ workers: [{ name: 'worker-1', state: 'stopped' }] });
    run.kill('SIGINT');
    expect(await run.untilExit()).toEqual({ code: 0, signal: null });
    await untilNobodyIsConnected();
  });
});

describe('a wrong command line', () => {
  it.each([
    [['--worker', '2'], 'did you mean --workers?'],
    [['--workers', '0'], 'a whole number from 1 to 16'],
    [['--workers'], '--workers needs a value'],
    [['--json=yes'], '--json takes no value'],
    [['one', 'two'], 'One folder at a time'],
    [['/nowhere/at/all'], 'There is no folder /nowhere/at/all'],
    [['--data', 'somewhere'], 'DATABASE_URL is set'],
  ])('%j says what is wrong', async (args, message) => {
    const run = demo(args);
    expect(await run.untilExit()).toEqual({ code: 2, signal: null });
    expect(run.output).toContain(message);
  });

  it('a folder without documents is refused', async () => {
    mkdirSync(join(scratch, 'empty'));
    const run = demo([join(scratch, 'empty'), '--report', scratch]);
    expect(await run.untilExit()).toEqual({ code: 2, signal: null });
    expect(run.output).toContain('it is empty');
  });
});
