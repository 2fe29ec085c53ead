/** What `tally_v1` says of some leases, in the same numbers as text. */
export interface Tally {
  leases: string;
  tokens: string;
  pairs: string;
  stops: boolean;
}

const TOKENS = 1_000_003n;
const JOBS = 1_000_033n;

/** Whether the database holds exactly these leases, none of which is to stop. */
export function tallies(
  jobs: readonly string[],
  tokens: readonly string[],
  { leases, stops, ...sums }: Tally,
): boolean {
  if (stops || Number(leases) !== jobs.length) return false;
  let sum = 0n;
  let pairs = 0n;
  tokens.forEach((text, i) => {
    const token = BigInt(text);
    sum += token;
    pairs += (token % TOKENS) * (BigInt(jobs[i] ?? 0) % JOBS);
  });
  return sum === BigInt(sums.tokens) && pairs === BigInt(sums.pairs);
}
