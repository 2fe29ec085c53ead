import { parseArgs } from 'node:util';
import { UsageError } from './errors';
import { didYouMean } from './suggest';

/** What the command line asked for. */
export interface DemoOptions {
  /** Undefined: the installed node_modules. */
  folder: string | undefined;
  workers: number;
  faults: boolean;
  serve: boolean;
  /** Where the embedded PostgreSQL keeps its data; undefined: a temporary folder. */
  data: string | undefined;
  json: boolean;
  /** Where the report goes. */
  report: string;
}

const MAX_WORKERS = 16;

const OPTIONS = {
  workers: { type: 'string' },
  'no-faults': { type: 'boolean' },
  serve: { type: 'boolean' },
  data: { type: 'string' },
  json: { type: 'boolean' },
  report: { type: 'string' },
  help: { type: 'boolean', short: 'h' },
} as const;

export const HELP = `Indexes a folder of documents with several worker processes, one of which is killed and one frozen meanwhile.

  npm start [-- [folder] [options]]

  folder             Markdown and text files are looked for in here. Default: the installed node_modules
  --workers <n>      Worker processes, 1 to ${MAX_WORKERS}. Default 3
  --no-faults        Kill and freeze nobody, run at full speed
  --serve            Leave the REST API up after the run, until Ctrl-C
  --data <folder>    Keep the embedded PostgreSQL's data in this folder
  --report <folder>  Where leasehold-report.json and leasehold-report.txt go. Default: the current folder
  --json             Print one line of JSON last, on stdout; everything else goes to stderr
  --help

DATABASE_URL=postgres://… uses that server instead of an embedded one, in a schema of its own that is dropped at the end.`;

/** @returns the options, or 'help'. @throws UsageError */
export function readOptions(args: string[]): DemoOptions | 'help' {
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
  if (values.help) return 'help';
  if (positionals.length > 1) {
    throw new UsageError(
      `One folder at a time, not ${positionals.length} (${positionals.join(', ')}): quote a name that has spaces`,
    );
  }
  return {
    folder: positionals[0],
    workers: workersOf(values.workers),
    faults: values['no-faults'] !== true,
    serve: values.serve === true,
    data: values.data as string | undefined,
    json: values.json === true,
    report: (values.report as string | undefined) ?? '.',
  };
}

function check(name: string, rawName: string, value: string | undefined): void {
  const known = Object.hasOwn(OPTIONS, name) ? OPTIONS[name as keyof typeof OPTIONS] : undefined;
  if (!known) {
    const hint = didYouMean(name, Object.keys(OPTIONS));
    throw new UsageError(
      `There is no option ${rawName}${hint === undefined ? ': see' : `; did you mean --${hint}? See`} --help`,
    );
  }
  if (known.type === 'boolean' && value !== undefined) throw new UsageError(`${rawName} takes no value`);
  if (known.type === 'string' && (value === undefined || value === '' || value.startsWith('--'))) {
    throw new UsageError(`${rawName} needs a value: ${rawName} ${name === 'workers' ? '3' : '<folder>'}`);
  }
}

function workersOf(value: string | boolean | undefined): number {
  if (value === undefined) return 3;
  const workers = /^\d{1,3}$/.test(`${value}`) ? Number(value) : 0;
  if (workers >= 1 && workers <= MAX_WORKERS) return workers;
  throw new UsageError(`--workers ${`${value}`} is not allowed: it must be a whole number from 1 to ${MAX_WORKERS}`);
}
