import { migrationSql } from './storage/migration-sql';

const USAGE = `Usage: leasehold migration-sql [--schema leasehold] [--after <migration>]

Prints the SQL that creates or updates Leasehold's schema, for a database whose DBA runs it by hand.
`;

/** The package's command line. */
export async function main(args: string[]): Promise<void> {
  const [command, ...rest] = args;
  const options = new Map<string, string>();
  for (let i = 0; i < rest.length; i += 2) options.set(rest[i] ?? '', rest[i + 1] ?? '');
  const unknown = [...options].find(([name, value]) => !['--schema', '--after'].includes(name) || value === '');
  if (command !== 'migration-sql' || unknown) {
    process.stderr.write(USAGE);
    process.exitCode = 2;
    return;
  }
  try {
    process.stdout.write(await migrationSql(options.get('--schema'), options.get('--after')));
  } catch (error) {
    process.stderr.write(`${error instanceof Error ? error.message : String(error)}\n`);
    process.exitCode = 1;
  }
}
