import 'reflect-metadata';
import { campaign } from './campaign';
import { HELP, UsageError, readOptions } from './options';
import { openStore } from './store';

const say = (text: string): void => void process.stderr.write(`${text}\n`);

async function main(): Promise<number> {
  let options;
  try {
    options = readOptions(process.argv.slice(2));
  } catch (error) {
    if (!(error instanceof UsageError)) throw error;
    say(error.message);
    return 2;
  }
  if (options === 'help') {
    process.stdout.write(`${HELP}\n`);
    return 0;
  }
  const { seed, seconds, scenarios, workers, json } = options;
  say(`seed ${seed}, ${seconds} s of ${scenarios.join(', ')}, ${workers} workers`);
  const store = await openStore();
  try {
    const { summary, breaches } = await campaign(store, options, say);
    say(breaches.length === 0 ? 'every rule holds' : `${breaches.length} rules are broken`);
    process.stdout.write(`${json ? JSON.stringify(summary) : JSON.stringify(summary, null, 2)}\n`);
    return breaches.length === 0 ? 0 : 1;
  } finally {
    await store.stop();
  }
}

void main().then(
  (code) => process.exit(code),
  (error: unknown) => {
    say(error instanceof Error ? (error.stack ?? error.message) : String(error));
    process.exit(1);
  },
);
