import type { Outcome } from '../settle/outcome';
import type { ClaimRequest } from './claim-request';
import type { Ranges } from './lane-marks';
import type { LeasedJob } from './leased-job';
import type { Lane } from './wake-up';

/** What `step_v1` returns. */
export interface StepRow extends Record<string, unknown> {
  applied: string | null;
  jobs: string | null;
  refused: boolean | null;
  scan: string | null;
}

/** Numbers as one text: `pg` escapes the elements of a list one by one. */
export const list = (numbers: readonly (string | number)[]): string => `{${numbers.join(',')}}`;

/** Of `completions` the parameters p_jobs, p_tokens and p_results. */
export function settleValues(completions: readonly { job: LeasedJob; outcome: Outcome }[]): unknown[] {
  const results = completions.map(({ outcome }) => (outcome as { result: string | null }).result);
  return [
    list(completions.map(({ job }) => job.id)),
    list(completions.map(({ job }) => job.token)),
    results.some((result) => result !== null) ? `[${results.map((r) => r ?? 'null').join(',')}]` : null,
  ];
}

const limitList = (limits: (number | null)[] | undefined): string | null =>
  limits?.some((limit) => limit !== null) ? list(limits.map((limit) => limit ?? 'NULL')) : null;

/** The parameters from p_want on. */
export function claimValues(claim: ClaimRequest | undefined, ranges: Ranges, maxBytes: number): unknown[] {
  const lanes = claim?.lanes ?? [];
  return [
    claim?.want ?? 0,
    lanes.map(([queue]) => queue),
    lanes.map(([, kind]) => kind),
    list(claim?.limits ?? []),
    claim?.suspects ?? 0,
    maxBytes,
    list(ranges.ends),
    list(ranges.fromPriorities),
    list(ranges.toPriorities),
    list(ranges.fromPositions),
    list(ranges.toPositions),
    limitList(claim?.fleet),
    limitList(claim?.queueLimits),
  ];
}

/** What `step_v1` says of its choice. */
export interface Scan {
  xmin: number;
  xid: number;
  us: number;
  /** Live workers, counted to three. */
  fleet: number;
  /** Of each lane: nothing more was free in it when the rows were chosen. */
  exhausted: boolean[];
  /** A limit of the fleet applied to some of the lanes. */
  capped: boolean;
  /** Lanes that are not worth another claim until something is heard of them. */
  empty: Lane[];
}

export function readScan(
  text: string,
  { lanes, limits, queueLimits, want }: ClaimRequest,
  jobs: readonly LeasedJob[],
): Scan {
  const [xmin = 0, xid = 0, us = 0, cut = 0, fleet = 0, paused = 0, capped = 0, ...counts] = text
    .split(',')
    .map(Number);
  const gave = new Map<string, number>();
  for (const { queue, kind, suspect } of jobs) {
    if (!suspect) gave.set(`${queue}\0${kind}`, (gave.get(`${queue}\0${kind}`) ?? 0) + 1);
  }
  // A lane gave less than it was asked for; one that was asked for nothing was not looked at.
  const dry = lanes.map(([queue, kind], i) => {
    const asked = Math.min(counts[i] ?? 0, want);
    return cut === 0 && asked > 0 && (gave.get(`${queue}\0${kind}`) ?? 0) < asked;
  });
  // How much each kind and queue was asked for, or gave: as much as this process may run is no sign of an empty lane.
  const below = (of: (lane: Lane, i: number) => number): ((lane: Lane, i: number) => boolean) => {
    const sums = new Map<string, number>();
    const add = (key: string, n: number): unknown => sums.set(key, (sums.get(key) ?? 0) + n);
    lanes.forEach((lane, i) => {
      add(`kind ${lane[1]}`, of(lane, i));
      add(`queue ${lane[0]}`, of(lane, i));
    });
    return ([queue, kind], i) =>
      (sums.get(`kind ${kind}`) ?? 0) < (limits[i] ?? 0) &&
      (sums.get(`queue ${queue}`) ?? 0) < (queueLimits?.[i] ?? Infinity);
  };
  // With several lanes each was asked for what it had, unless that was more than wanted, or than this process may run.
  const all =
    lanes.length > 1 &&
    cut === 0 &&
    counts.reduce((sum, count) => sum + count, 0) < want &&
    lanes.every(below((_, i) => counts[i] ?? 0));
  // Everything that the limits of the fleet left was taken: more is to be had when a place is given back, or by the next poll.
  const rest =
    capped === 1 && cut === 0 && jobs.length < want ? below((lane) => gave.get(lane.join('\0')) ?? 0) : () => false;
  return {
    xmin,
    xid,
    us,
    fleet,
    // A paused queue gives nothing, whatever it holds.
    exhausted: dry.map((is) => is && paused === 0),
    capped: capped === 1,
    empty: lanes.filter((lane, i) => all || rest(lane, i) || dry[i]),
  };
}
