import type { BenchCase } from './cases';
import { type About, type ContenderName, PEERS, type PeerName } from './contenders/contender';
import type { Machine } from './environment/machine';
import type { Measurement } from './measure/measurement';
import { median, rounded } from './measure/statistics';

/** One case, as `--json` prints it and the raw results keep it. Medians over the rounds; null = not measured, the reason was on stderr. */
export interface CaseResult {
  case: string;
  title: string;
  unit: string;
  better: 'higher' | 'lower';
  ours: number | null;
  peers: Partial<Record<PeerName, number | null>>;
  /** Above 1: ours is better, whatever the unit. */
  ratio: Partial<Record<PeerName, number | null>>;
  /** Peers that were not measured: their figure is the limit in their documentation. */
  documented: PeerName[];
  /** Ours, per job. */
  walBytes: number | null;
  deadTuples: number | null;
  cpuUs: { server: number | null; node: number | null };
  /** Smallest and largest of the rounds. */
  spread: Partial<Record<ContenderName, [number, number]>>;
  /** By contender: costs a job and whatever else the case counts. */
  detail: Partial<Record<ContenderName, Record<string, number>>>;
  rounds: number;
  /** ISO date and time of its end. */
  measuredAt: string;
}

/** A contender as the results describe it. */
export interface ContenderResult extends About {
  version: string;
}

/** All that the document is made of. */
export interface Results {
  commands: string[];
  quick: boolean;
  scale: number;
  machine: Machine;
  /** Processes that wanted a CPU in the minute before; on an idle machine, near zero. */
  loadBefore: number;
  versions: { node: string; postgres: string; redis: string | null };
  postgresSettings: Record<string, string>;
  contenders: Partial<Record<ContenderName, ContenderResult>>;
  /** Peers that were left out, and why. */
  skipped: Partial<Record<PeerName, string>>;
  cases: CaseResult[];
}

/** By contender, one entry a round; undefined = failed in it. */
export type Samples = Map<ContenderName, (Measurement[] | undefined)[]>;

export function summarise(
  { name, title, unit, better, documented = [] }: BenchCase,
  samples: Samples,
  limits: Partial<Record<PeerName, number>>,
): CaseResult {
  const result: CaseResult = {
    case: name,
    title,
    unit,
    better,
    ours: null,
    peers: {},
    ratio: {},
    documented: [],
    walBytes: null,
    deadTuples: null,
    cpuUs: { server: null, node: null },
    spread: {},
    detail: {},
    rounds: Math.max(0, ...[...samples.values()].map((rounds) => rounds.length)),
    measuredAt: new Date().toISOString(),
  };
  for (const [contender, rounds] of samples) {
    const all = rounds.flatMap((round) => round ?? []);
    const value = middle(all.map((one) => one.value));
    if (contender === 'ours') {
      result.ours = value;
      result.walBytes = middle(defined(all.map((one) => one.walBytes)));
      result.deadTuples = middle(defined(all.map((one) => one.deadTuples)));
      result.cpuUs = {
        server: middle(defined(all.map((one) => one.cpuUs?.server))),
        node: middle(defined(all.map((one) => one.cpuUs?.node))),
      };
    } else {
      result.peers[contender] = value;
      result.ratio[contender] = middle(ratios(samples.get('ours') ?? [], rounds, better));
    }
    if (value === null) continue;
    const values = all.map((one) => one.value);
    result.spread[contender] = [rounded(Math.min(...values)), rounded(Math.max(...values))];
    result.detail[contender] = detailOf(all);
  }
  for (const peer of PEERS) {
    const limit = limits[peer];
    if (!documented.includes(peer) || limit === undefined) continue;
    result.documented.push(peer);
    result.peers[peer] = limit;
    result.ratio[peer] = result.ours === null ? null : rounded(limit / result.ours);
  }
  return result;
}

/** Round by round, so that what slows a whole round down counts for both. */
function ratios(
  ours: (Measurement[] | undefined)[],
  theirs: (Measurement[] | undefined)[],
  better: 'higher' | 'lower',
): number[] {
  return ours.flatMap((round, i) => {
    const mine = median((round ?? []).map(({ value }) => value));
    const other = median((theirs[i] ?? []).map(({ value }) => value));
    if (mine === undefined || other === undefined) return [];
    return [better === 'higher' ? mine / other : other / mine];
  });
}

function detailOf(all: Measurement[]): Record<string, number> {
  const flat = all.map(({ walBytes, deadTuples, cpuUs, detail }) => ({
    walBytes,
    deadTuples,
    serverUs: cpuUs?.server,
    nodeUs: cpuUs?.node,
    ...detail,
  }));
  const names = new Set(flat.flatMap((one) => Object.keys(one)));
  const entries = [...names].flatMap((name) => {
    const value = middle(defined(flat.map((one) => (one as Record<string, number | undefined>)[name])));
    return value === null ? [] : [[name, value] as const];
  });
  return Object.fromEntries(entries);
}

function middle(values: number[]): number | null {
  const value = median(values);
  return value === undefined || !Number.isFinite(value) ? null : rounded(value);
}

const defined = (values: (number | undefined)[]): number[] => values.filter((value) => value !== undefined);
