import { chmodSync, mkdtempSync, readFileSync, readdirSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { CASES } from '../apps/bench/src/cases';
import { readOptions } from '../apps/bench/src/cli';
import type { PeerName } from '../apps/bench/src/contenders/contender';
import { UsageError } from '../apps/bench/src/errors';
import { median, percentile } from '../apps/bench/src/measure/statistics';
import { chartOf } from '../apps/bench/src/report/chart';
import { readResults, withFormerCases, writeDocument } from '../apps/bench/src/report/document';
import { type CaseResult, type Results, type Samples, summarise } from '../apps/bench/src/results';
import { type TestProcess, eventually, startProcess } from './support';

const MAIN = join(__dirname, '..', 'apps', 'bench', 'src', 'main.js');
const RUN_MS = 50_000;

let scratch: string;

beforeAll(() => {
  scratch = mkdtempSync(join(tmpdir(), 'leasehold bench '));
  chmodSync(scratch, 0o755); // The account that runs PostgreSQL must get in.
});

afterAll(() => rmSync(scratch, { recursive: true, force: true }));

/** What the benchmark leaves in its temporary folder would be seen there. */
const bench = (...args: string[]): TestProcess => startProcess(MAIN, { args, env: { TMPDIR: scratch } });

const sample = (name: string, ours: number, peers: Partial<Record<PeerName, number>>): CaseResult => {
  const one = CASES.find((candidate) => candidate.name === name);
  if (!one) throw new Error(`there is no case ${name}`);
  const costs = { walBytes: 700, deadTuples: 2, cpuUs: { server: 9, node: 4 }, detail: { jobs: 10 } };
  const samples: Samples = new Map([['ours', [[{ value: ours, ...costs }]]]]);
  for (const [peer, value] of Object.entries(peers)) samples.set(peer as PeerName, [[{ value }]]);
  return summarise(one, samples, { graphile: 14_400 });
};

const about = { title: 'Leasehold', package: 'x', version: '1.2.3', settings: ['defaults'], contract: ['fenced'] };

const results = (...cases: CaseResult[]): Results => ({
  commands: ['npm run bench'],
  quick: false,
  scale: 1,
  machine: { cpu: 'A <fast> CPU', cores: 2, memoryGb: 24, os: 'Linux' },
  loadBefore: 0.1,
  versions: { node: '22.1.0', postgres: '18.4', redis: null },
  postgresSettings: { fsync: 'on' },
  contenders: { ours: about, graphile: { ...about, title: 'graphile-worker' }, pgboss: { ...about, title: 'pg-boss' } },
  skipped: { bullmq: 'there is no redis-server on the PATH' },
  cases,
});

describe('a run', () => {
  it(
    'prints a line of JSON for each case, with the cases of one contender',
    async () => {
      const run = bench(
        ...['--only', 'add1,bulk,drain,latency20', '--peers', 'none', '--rounds', '1', '--scale', '0.02', '--json'],
      );
      expect(await run.untilExit(RUN_MS)).toEqual({ code: 0, signal: null });
      const lines = run.lines
        .filter((line) => line.startsWith('{'))
        .map((line) => JSON.parse(line) as CaseResult & Record<string, unknown>);
      expect(lines.map((line) => line.case)).toEqual(['add1', 'bulk', 'drain', 'latency20']);
      for (const line of lines) {
        expect(line).toMatchObject({ peers: {}, ratio: {}, documented: [], rounds: 1 });
        expect(line.ours).toBeGreaterThan(0);
        expect(line.spread.ours).toEqual([line.ours, line.ours]);
        expect(line.walBytes).toBeGreaterThan(0);
        expect(line.cpuUs).toEqual({ server: expect.any(Number), node: expect.any(Number) });
      }
      const [add1, bulk, drain, latency] = lines;
      expect(add1).toMatchObject({
        unit: 'jobs/s',
        better: 'higher',
        detail: { ours: { callP50Ms: expect.any(Number) } },
      });
      expect(bulk?.ours).toBeGreaterThan(add1?.ours ?? Infinity);
      expect(drain).toMatchObject({ deadTuples: expect.any(Number), detail: { ours: { jobs: 4000 } } });
      expect(latency).toMatchObject({ unit: 'ms', better: 'lower', detail: { ours: { p99Ms: expect.any(Number) } } });
      await eventually(() => readdirSync(scratch).length === 0, {
        what: 'Removal of all temporary folders',
        state: () => readdirSync(scratch),
      });
    },
    RUN_MS,
  );

  it(
    'ends everything on SIGTERM',
    async () => {
      const run = bench('--only', 'drain', '--peers', 'none', '--rounds', '1');
      await eventually(() => run.output.includes('PostgreSQL 18'), { what: 'Start', state: () => run.output });
      run.kill('SIGTERM');
      expect(await run.untilExit()).toEqual({ code: 143, signal: null });
      await eventually(() => readdirSync(scratch).length === 0, {
        what: 'Removal of all temporary folders',
        state: () => readdirSync(scratch),
      });
    },
    RUN_MS,
  );
});

describe('the command line', () => {
  it('refuses what it does not know with code 2 and starts nothing', async () => {
    const run = bench('--peers', 'graphile,bull', '--json');
    expect(await run.untilExit()).toEqual({ code: 2, signal: null });
    expect(run.lines).toEqual([
      '--peers bull is not allowed: it must be of graphile, pgboss, bullmq, bullpg, all or none',
    ]);
    expect(readdirSync(scratch)).toEqual([]);
  });

  it.each([
    [['--rounds', '0'], '--rounds 0 is not allowed: it must be a whole number from 1 to 50'],
    [['--rounds'], '--rounds needs a value: --rounds 3'],
    [['--scale', '2'], '--scale 2 is not allowed: it must be a number above 0 and at most 1'],
    [['--only', 'drian'], '--only drian is not allowed: it must be of add1, add16, bulk, drain,'],
    [['--quick=yes'], '--quick takes no value'],
    [['--fast'], 'There is no option --fast: the options are --quick, --rounds,'],
    [['drain'], "'drain' belongs to no option: see --help"],
  ])('%j', (args, message) => {
    const read = (): unknown => readOptions(args);
    expect(read).toThrow(UsageError);
    expect(read).toThrow(message);
  });

  it('has all cases, all peers and three rounds by default, one if quick', () => {
    expect(readOptions([])).toMatchObject({
      rounds: 3,
      scale: 1,
      peers: { length: 4 },
      only: { length: CASES.length },
    });
    expect(readOptions(['--quick', '--peers', 'none', '--only', 'bulk,add1'])).toMatchObject({
      rounds: 1,
      peers: [],
      only: ['add1', 'bulk'],
    });
  });
});

describe('the figures', () => {
  it('are above 1 in a ratio when ours is better, whatever the unit', () => {
    expect(sample('drain', 300, { graphile: 100 }).ratio).toEqual({ graphile: 3 });
    expect(sample('latency20', 1, { graphile: 3 }).ratio).toEqual({ graphile: 3 });
  });

  it('say which ones are out of documentation', () => {
    expect(sample('recoverKill', 4, {})).toMatchObject({
      documented: ['graphile'],
      peers: { graphile: 14_400 },
      ratio: { graphile: 3600 },
    });
  });

  it('are medians over the rounds, of ratios within each round', () => {
    const drain = CASES.find(({ name }) => name === 'drain');
    if (!drain) throw new Error('there is no drain');
    const rounds = (...values: (number | undefined)[]) => values.map((value) => (value ? [{ value }] : undefined));
    const samples: Samples = new Map([
      ['ours', rounds(100, 200, 600)],
      ['graphile', rounds(50, 50, 100)],
      ['pgboss', rounds(undefined, 100, undefined)],
      ['bullmq', rounds(undefined, undefined, undefined)],
    ]);
    expect(summarise(drain, samples, {})).toMatchObject({
      ours: 200,
      peers: { graphile: 50, pgboss: 100, bullmq: null },
      ratio: { graphile: 4, pgboss: 2, bullmq: null },
      spread: { ours: [100, 600], graphile: [50, 100] },
      rounds: 3,
    });
    expect(median([4, 1, 3, 2])).toBe(2.5);
    expect(median([])).toBeUndefined();
    expect(percentile([5, 1, 4, 2, 3], 0.99)).toBe(5);
  });
});

describe('the document', () => {
  it('is made of raw results, and again from its own file', () => {
    const folder = mkdtempSync(join(scratch, 'docs'));
    const stored = results(sample('drain', 100, { graphile: 40, pgboss: 200 }), sample('recoverKill', 3, {}));
    writeDocument(stored, folder);
    const markdown = readFileSync(join(folder, 'benchmarks.md'), 'utf8');
    expect(markdown).toContain(
      '| `drain` | handlers that do nothing, 1 process | jobs/s | **100** | 40 (2.5×) | 200 (0.50×) |',
    );
    expect(markdown).toContain('14,400\\* (4,800×)');
    expect(markdown).toContain('![How many times better Leasehold is than each peer](benchmarks.svg)');
    expect(markdown).toContain('Left out: bullmq (there is no redis-server on the PATH).');
    const again = readResults(join(folder, 'benchmarks.json'));
    expect(again).toEqual(stored);
    expect(readFileSync(join(folder, 'benchmarks.svg'), 'utf8')).toBe(chartOf(again));
    rmSync(folder, { recursive: true });
  });

  it('has a bar for each ratio, to the right of 1 where ours is better', () => {
    const svg = chartOf(results(sample('drain', 100, { graphile: 40, pgboss: 200 })));
    const bars = [...svg.matchAll(/<rect x="(\d+)" y="\d+" width="(\d+)" height="9"/g)].map(([, x]) => Number(x));
    expect(bars).toHaveLength(2);
    expect(bars[1]).toBeLessThan(bars[0] ?? 0);
    expect(svg).toContain('>2.5×</text>');
    expect(svg).not.toContain('<fast>');
  });

  it('keeps the cases of the last one if the circumstances are the same', () => {
    const folder = mkdtempSync(join(scratch, 'docs'));
    writeDocument(results(sample('drain', 1, {}), sample('memory', 90, {})), folder);
    const fresh = results(sample('drain', 2, {}), sample('add1', 3, {}));
    const merged = withFormerCases(fresh, folder);
    expect(merged.cases.map((one) => [one.case, one.ours])).toEqual([
      ['add1', 3],
      ['drain', 2],
      ['memory', 90],
    ]);
    expect(withFormerCases({ ...fresh, machine: { ...fresh.machine, cores: 4 } }, folder).cases).toEqual(fresh.cases);
    rmSync(folder, { recursive: true });
  });

  it('is not made of another file', async () => {
    const path = join(scratch, 'other.json');
    writeFileSync(path, '{}');
    const run = bench('--from', path);
    expect(await run.untilExit()).toEqual({ code: 1, signal: null });
    expect(run.output).toContain('cannot be read as raw results of a benchmark: it holds no results');
    rmSync(path);
  });
});
