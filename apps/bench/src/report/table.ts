import { CONTENDERS, type ContenderName } from '../contenders/contender';
import type { CaseResult, Results } from '../results';

/** Everything that was measured, for a terminal. */
export function tableOf(results: Results): string {
  const present = CONTENDERS.filter((contender) => results.contenders[contender]);
  const head = ['case', 'unit', ...present.map((contender) => results.contenders[contender]?.title ?? contender)];
  const rows = results.cases.map((one) => [one.case, one.unit, ...present.map((contender) => cell(one, contender))]);
  const widths = head.map((text, i) => Math.max(text.length, ...rows.map((row) => row[i]?.length ?? 0)));
  const line = (cells: string[]): string =>
    cells.map((text, i) => (i < 2 ? text.padEnd(widths[i] ?? 0) : text.padStart(widths[i] ?? 0))).join('  ');
  return [
    line(head),
    ...rows.map(line),
    '',
    'In parentheses: how much better Leasehold is (above 1) or worse (below). * = limit in its documentation, not measured.',
  ].join('\n');
}

function cell(one: CaseResult, contender: ContenderName): string {
  if (contender === 'ours') return numberText(one.ours);
  const value = one.peers[contender];
  if (value === undefined) return '';
  const ratio = one.ratio[contender];
  const mark = one.documented.includes(contender) ? '*' : '';
  return `${numberText(value)}${mark}${ratio == null ? '' : ` (${ratioText(ratio)})`}`;
}

/** With separators of thousands, and as many digits as are worth it. */
export function numberText(value: number | null | undefined): string {
  if (value == null) return 'failed';
  if (Math.abs(value) >= 100) return Math.round(value).toLocaleString('en-US');
  return String(Number(value.toPrecision(3)));
}

export const ratioText = (ratio: number): string =>
  `${ratio >= 100 ? Math.round(ratio).toLocaleString('en-US') : ratio.toPrecision(2)}×`;
