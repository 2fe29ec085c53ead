import { parseArgs } from 'node:util';
import { SCENARIOS } from './faults';

/** What the command line asked for. */
export interface ChaosOptions {
  seconds: number;
  seed: number;
  scenarios: string[];
  workers: number;
  json: boolean;
}

export const HELP = `Runs a fleet of workers under faults, and checks at the end that no job was lost, doubled or left behind.

  npm run chaos [-- options]

  --seconds <n>       How long faults are injected, 5 to 7200. Default 120
  --seed <n>          Repeats the faults of a run, in the same order. Default: by the clock
  --scenario <name>   One of ${Object.keys(SCENARIOS).join(', ')}; may be given several times. Default: all of them, in turn
  --workers <n>       Worker processes, 2 to 16. Default 4
  --json              One line of JSON last; everything else goes to stderr
  --help`;

export class UsageError extends Error {}

/** @returns the options, or 'help'. @throws UsageError */
export function readOptions(args: string[]): ChaosOptions | 'help' {
  let values;
  try {
    ({ values } = parseArgs({
      args,
      options: {
        seconds: { type: 'string' },
        seed: { type: 'string' },
        scenario: { type: 'string', multiple: true },
        workers: { type: 'string' },
        json: { type: 'boolean' },
        help: { type: 'boolean', short: 'h' },
      },
    }));
  } catch (error) {
    throw new UsageError(`${(error as Error).message}: see --help`);
  }
  if (values.help) return 'help';
  const scenarios = values.scenario ?? Object.keys(SCENARIOS);
  for (const name of scenarios) {
    if (!Object.hasOwn(SCENARIOS, name)) {
      throw new UsageError(`--scenario ${name} is none of ${Object.keys(SCENARIOS).join(', ')}`);
    }
  }
  return {
    seconds: number('seconds', values.seconds, 5, 7200) ?? 120,
    seed: number('seed', values.seed, 0, 4_294_967_295) ?? Date.now() % 1_000_000,
    scenarios,
    workers: number('workers', values.workers, 2, 16) ?? 4,
    json: values.json === true,
  };
}

function number(name: string, value: string | undefined, min: number, max: number): number | undefined {
  if (value === undefined) return undefined;
  const parsed = /^\d{1,10}$/.test(value) ? Number(value) : NaN;
  if (parsed >= min && parsed <= max) return parsed;
  throw new UsageError(`--${name} ${value} is not allowed: it must be a whole number from ${min} to ${max}`);
}
