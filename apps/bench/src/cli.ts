import { parseArgs } from 'node:util';
import { CASES } from './cases';
import { PEERS, type PeerName } from './contenders/contender';
import { UsageError } from './errors';

/** What the command line asked for. */
export interface BenchOptions {
  quick: boolean;
  rounds: number;
  /** Names of the cases. */
  only: string[];
  peers: PeerName[];
  json: boolean;
  scale: number;
  write: boolean;
  /** A file of raw results to write the document from, without measuring. */
  from: string | undefined;
}

const MAX_ROUNDS = 50;

const OPTIONS = {
  quick: { type: 'boolean' },
  rounds: { type: 'string' },
  only: { type: 'string' },
  peers: { type: 'string' },
  json: { type: 'boolean' },
  scale: { type: 'string' },
  write: { type: 'boolean' },
  from: { type: 'string' },
  help: { type: 'boolean', short: 'h' },
} as const;

const EXAMPLES: Record<string, string> = {
  rounds: '3',
  only: 'drain,bulk',
  peers: 'graphile,pgboss',
  scale: '0.05',
  from: 'docs/benchmarks.json',
};

const CASE_NAMES = CASES.map(({ name }) => name);

export const HELP = `Measures Leasehold and its peers, each on a server of its own, in turns.

  npm run bench [-- options]

  --quick            Smaller sizes, one round, under ten minutes in all
  --rounds <n>       How often everything is measured, 1 to ${MAX_ROUNDS}. Default 3; 1 with --quick
  --only <cases>     ${CASE_NAMES.join(', ')}
  --peers <peers>    ${PEERS.join(', ')}, all (the default) or none, which installs nothing
  --scale <factor>   Fraction of sizes and times, for smoke tests: above 0, at most 1
  --json             One line of JSON a case on stdout; everything else goes to stderr
  --write            Write docs/benchmarks.md, .svg and .json; cases that were not measured now are kept from the last .json
  --from <file>      Measure nothing: write the document from this file of raw results
  --help

A number above 1 in a column of ratios says that Leasehold is better, whatever the unit.`;

/** @returns the options, or 'help'. @throws UsageError */
export function readOptions(args: string[]): BenchOptions | 'help' {
  const { values, positionals, tokens } = parseArgs({
    args,
    options: OPTIONS,
    strict: false,
    allowPositionals: true,
    tokens: true,
  });
  for (const token of tokens) {
    if (token.kind === 'option') check(token.name, token.rawName, token.value);
  }
  if (positionals.length > 0) throw new UsageError(`'${positionals.join(' ')}' belongs to no option: see --help`);
  if (values.help) return 'help';
  const quick = values.quick === true;
  return {
    quick,
    rounds: roundsOf(textOf(values.rounds), quick),
    only: listOf('--only', textOf(values.only), CASE_NAMES) ?? CASE_NAMES,
    peers: peersOf(textOf(values.peers)),
    json: values.json === true,
    scale: scaleOf(textOf(values.scale)),
    write: values.write === true,
    from: textOf(values.from),
  };
}

const textOf = (value: string | boolean | undefined): string | undefined =>
  typeof value === 'string' ? value : undefined;

function check(name: string, rawName: string, value: string | undefined): void {
  const known = Object.hasOwn(OPTIONS, name) ? OPTIONS[name as keyof typeof OPTIONS] : undefined;
  if (!known) {
    throw new UsageError(`There is no option ${rawName}: the options are --${Object.keys(OPTIONS).join(', --')}`);
  }
  if (known.type === 'boolean' && value !== undefined) throw new UsageError(`${rawName} takes no value`);
  if (known.type === 'string' && (value === undefined || value === '' || value.startsWith('--'))) {
    throw new UsageError(`${rawName} needs a value: ${rawName} ${EXAMPLES[name]}`);
  }
}

function roundsOf(value: string | undefined, quick: boolean): number {
  if (value === undefined) return quick ? 1 : 3;
  const rounds = /^\d{1,3}$/.test(value) ? Number(value) : 0;
  if (rounds >= 1 && rounds <= MAX_ROUNDS) return rounds;
  throw new UsageError(`--rounds ${value} is not allowed: it must be a whole number from 1 to ${MAX_ROUNDS}`);
}

function scaleOf(value: string | undefined): number {
  if (value === undefined) return 1;
  const scale = Number(value);
  if (scale > 0 && scale <= 1) return scale;
  throw new UsageError(`--scale ${value} is not allowed: it must be a number above 0 and at most 1`);
}

function peersOf(value: string | undefined): PeerName[] {
  if (value === undefined || value === 'all') return [...PEERS];
  if (value === 'none') return [];
  return listOf<PeerName>('--peers', value, PEERS, ', all or none') ?? [];
}

function listOf<T extends string>(
  flag: string,
  value: string | undefined,
  allowed: readonly T[],
  more = '',
): T[] | undefined {
  if (value === undefined) return undefined;
  const names = value.split(',').map((name) => name.trim());
  const wrong = names.find((name) => !(allowed as readonly string[]).includes(name));
  if (wrong !== undefined)
    throw new UsageError(`${flag} ${wrong} is not allowed: it must be of ${allowed.join(', ')}${more}`);
  return allowed.filter((name) => names.includes(name));
}
